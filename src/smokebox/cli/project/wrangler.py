"""`smokebox import`: the configuration of a Cloudflare project becomes a `smokebox.toml`."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smokebox.errors import Conflict, InvalidOption, from_os_error
from smokebox.project import CONFIG_FILE, read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable

# Types of instances that Cloudflare has renamed.
_RENAMED = {"dev": "lite", "standard": "standard-1"}
_CUSTOM = {"vcpu": "cpu", "memory_mib": "memory", "disk_mb": "disk"}
_UNITS = {"memory": "MiB", "disk": "MB"}
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", re.IGNORECASE | re.MULTILINE)
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

# What has no counterpart, and what to do instead.
_REASONS = {
    "account_id": "used for the endpoints of buckets only",
    "assets": "serve files by a route of app.py",
    "build": "nothing is bundled",
    "compatibility_date": "there is no Workers runtime",
    "compatibility_flags": "there is no Workers runtime",
    "env": "environments: write a smokebox.toml for each",
    "main": "agents are files in agents/, workflows files in workflows/",
    "migrations": "a sandbox exists from its first use",
    "name": "a project has no name of its own",
    "observability": "the server has logs, metrics and OTLP",
    "routes": "the app has its routes, see `smokebox dev`",
    "triggers": "give a workflow a schedule",
    "vars": "write them into .env",
}
_IGNORED = frozenset(("$schema", "containers", "durable_objects", "r2_buckets"))


@dataclass(frozen=True, slots=True)
class ImportedProject:
    """The text of a `smokebox.toml`, and notes about what is not in it."""

    text: str
    notes: list[str] = field(default_factory=list)


def import_wrangler(
    file: Annotated[str, typer.Argument(help="wrangler.jsonc, .json or .toml.")] = "wrangler.jsonc",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a smokebox.toml that exists.")
    ] = False,
) -> int:
    """Write the smokebox.toml of a Cloudflare project, beside its wrangler.jsonc.

    Takes over containers, bindings of durable objects and R2 buckets, and lists what has no
    counterpart.
    """
    path = Path(file)
    imported = convert(_read(path), path)
    target = path.parent / CONFIG_FILE
    _write(target, imported.text, replace=force)
    typer.echo(f"  {target}")
    if imported.notes:
        typer.echo("\nNot taken over, or to do:")
        for note in imported.notes:
            typer.echo(f"  {note}")
    return 0


def _write(target: Path, text: str, *, replace: bool) -> None:
    """Write a file as a whole or not at all."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        if replace:
            unfinished.replace(target)
        else:
            target.hardlink_to(unfinished)
    except FileExistsError:
        raise Conflict(
            f"{target} exists.",
            hint="Pass --force to replace it.",
            kind="file",
            name=str(target),
        ) from None
    except OSError as error:
        raise from_os_error(error, str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def convert(config: dict[str, Any], file: Path) -> ImportedProject:
    """Convert a configuration. `file` is where it was read, for paths and errors.

    Raises:
        InvalidOption: A value that is taken over has the wrong type.
    """
    reader = _Reader(file)
    notes: list[str] = []
    lines = [f"# From {file.name}. See docs/client.md for all settings."]
    durable = reader.table(config, "durable_objects")
    bound = reader.tables(durable, "bindings", "durable_objects.bindings")
    containers = reader.tables(config, "containers", "containers")
    names: dict[str, list[str]] = {}
    for binding in bound:
        class_name = reader.text(binding, "class_name", "durable_objects.bindings")
        names.setdefault(class_name, []).append(
            reader.text(binding, "name", "durable_objects.bindings")
        )
    for container in containers:
        class_name = reader.text(container, "class_name", "containers")
        for name in names.pop(class_name, [class_name]):
            lines += _sandbox(reader, name, class_name, container, notes)
    for class_name, unused in names.items():
        notes.append(f"durable_objects {', '.join(unused)}: {class_name} has no container")
    for bucket in reader.tables(config, "r2_buckets", "r2_buckets"):
        lines += _bucket(reader, bucket, config.get("account_id"), notes)
    notes += [
        f"{key}: {_REASONS.get(key, 'it has no counterpart')}"
        for key in config
        if key not in _IGNORED
    ]
    text = "\n".join(lines) + "\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidOption(
            f"{file} gives one name to two bindings ({error}).",
            hint="Rename one of them.",
            option=str(file),
        ) from error
    return ImportedProject(text, notes)


def _sandbox(
    reader: _Reader, name: str, class_name: str, container: dict[str, Any], notes: list[str]
) -> list[str]:
    where = f"containers {class_name}"
    image = reader.image(container, where, notes)
    lines = ["", f"[sandboxes.{_key(name)}]", f"image = {_string(image)}"]
    if class_name not in ("Sandbox", name):
        lines.append(
            f"# class_name = {_string(class_name)}  # a subclass of Sandbox with egress handlers"
        )
    lines += _limits(container.get("instance_type"), where, notes)
    count = container.get("max_instances")
    if count is not None:
        notes.append(
            f"{where}.max_instances = {count!r}: write sandboxes = {count!r} into a profile of "
            "server.toml, which counts the sandboxes of a key"
        )
    known = {"class_name", "image", "instance_type", "max_instances"}
    notes += [f"{where}.{key}: it has no counterpart" for key in container if key not in known]
    return lines


def _limits(kind: object, where: str, notes: list[str]) -> list[str]:
    from smokebox.limits import INSTANCE_TYPES

    if kind is None:
        return []
    if isinstance(kind, dict) and kind.keys() <= _CUSTOM.keys() and _are_numbers(kind.values()):
        pairs = []
        for key, value in kind.items():
            name = _CUSTOM[key]
            unit = _UNITS.get(name)
            pairs.append(f"{name} = {_string(f'{value}{unit}') if unit else value}")
        return [f"limits = {{ {', '.join(pairs)} }}"]
    named = _RENAMED.get(str(kind), str(kind))
    if named in INSTANCE_TYPES:
        return [f"limits = {_string(named)}"]
    notes.append(f"{where}.instance_type = {kind!r}: write limits of your own")
    return []


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


def _bucket(
    reader: _Reader, bucket: dict[str, Any], account: object, notes: list[str]
) -> list[str]:
    name = reader.text(bucket, "binding", "r2_buckets")
    lines = ["", f"[buckets.{_key(name)}]"]
    lines.append(f"bucket = {_string(reader.text(bucket, 'bucket_name', 'r2_buckets'))}")
    jurisdiction = bucket.get("jurisdiction")
    place = f".{jurisdiction}" if jurisdiction in ("eu", "fedramp") else ""
    if isinstance(account, str):
        lines.append(f"endpoint = {_string(f'https://{account}{place}.r2.cloudflarestorage.com')}")
    else:
        lines.append(f'# endpoint = "https://ACCOUNT_ID{place}.r2.cloudflarestorage.com"')
        notes.append(f"r2_buckets {name}: write its endpoint, which has the id of your account")
    notes.append(f"r2_buckets {name}: write AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY into .env")
    known = {"binding", "bucket_name", "jurisdiction"}
    notes += [f"r2_buckets {name}.{key}: no counterpart" for key in bucket if key not in known]
    return lines


class _Reader:
    """Reads values of a configuration, with errors that name the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def table(self, config: dict[str, Any], key: str) -> dict[str, Any]:
        """Return a table; empty if it is missing."""
        found: dict[str, Any] = self._typed(config.get(key, {}), dict, key, "a table")
        return found

    def tables(self, config: dict[str, Any], key: str, name: str) -> list[dict[str, Any]]:
        """Return a list of tables; empty if it is missing."""
        found: list[Any] = self._typed(config.get(key, []), list, name, "a list of tables")
        return [self._typed(one, dict, name, "a list of tables") for one in found]

    def text(self, table: dict[str, Any], key: str, name: str) -> str:
        """Return a text that has to be there."""
        value: str = self._typed(table.get(key), str, f"{name}.{key}", "a text")
        return value or self._typed(None, str, f"{name}.{key}", "a text")

    def image(self, container: dict[str, Any], where: str, notes: list[str]) -> str:
        """Return the image of a container: a path from `./`, or a reference."""
        from smokebox.engine.images.registry.reference import recipe_in_place_of

        image = self.text(container, "image", where)
        path = self.file.parent / image
        if not path.exists():
            if recipe := recipe_in_place_of(image):
                notes.append(f'{where}: write image = "{recipe}" if {image} cannot be pulled')
            return image
        try:
            dockerfile = path / "Dockerfile" if path.is_dir() else path
            bases = _FROM.findall(dockerfile.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            bases = []
        notes += [
            f"{image}: write FROM {recipe} if {base} cannot be pulled"
            for base in bases
            if (recipe := recipe_in_place_of(base))
        ]
        return image if image.startswith(("./", "../", "/")) else f"./{image}"

    def _typed(self, value: Any, kind: type[Any], name: str, wanted: str) -> Any:
        if isinstance(value, kind):
            return value
        shown = "is missing" if value is None else f"is {wanted}, not {value!r:.100}"
        raise InvalidOption(
            f"{self.file}: {name} {shown}.",
            hint=f"Correct {name}; `wrangler deploy --dry-run` checks the file.",
            option=name,
            value=value,
        )


def _read(file: Path) -> dict[str, Any]:
    if file.suffix not in (".jsonc", ".json", ".toml"):
        raise InvalidOption(
            f"{file} is no configuration of wrangler.",
            hint="Pass its wrangler.jsonc, wrangler.json or wrangler.toml.",
            option="file",
            value=str(file),
        )
    try:
        if file.suffix == ".toml":
            return read_toml(file)
        found = parse_jsonc(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise from_os_error(error, str(file)) from error
    except (ValueError, RecursionError) as error:
        raise InvalidOption(
            f"{file} is not JSON: {error}.", hint="Fix that line.", option=str(file)
        ) from error
    if not isinstance(found, dict):
        raise InvalidOption(
            f"{file} is not an object of JSON.", hint="Begin it with {.", option=str(file)
        )
    return found


def parse_jsonc(text: str) -> Any:
    """Parse JSON with comments and trailing commas. Raises `ValueError` with the line."""
    # Newlines stay, so that errors name the right line.
    plain = _COMMENT.sub(lambda one: one[1] or re.sub(r"[^\n]", " ", one[0]), text)
    return json.loads(_TRAILING_COMMA.sub(lambda one: one[1] or " ", plain))


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # A string of JSON is one of TOML, whose escapes have no surrogates.
    return (
        json.dumps(text, ensure_ascii=False)
        .replace("\x7f", "\\u007f")
        .encode(errors="replace")
        .decode()
    )
