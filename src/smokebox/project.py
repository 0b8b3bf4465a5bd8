"""Configuration of a project: `smokebox.toml` (or `[tool.smokebox]`) and the `.env` beside it.

The only reader of these files, shared by SDK, agents, app and server. It checks that tables and
names are known; the rooms that use a table check its values.
"""

from __future__ import annotations

import os
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "smokebox.toml"
PYPROJECT = "pyproject.toml"
SECRETS_FILE = ".env"

_TABLES = ("sandboxes", "buckets", "models", "app")
_BUCKET_OPTIONS = frozenset(
    (
        "allow_http",
        "anonymous",
        "bucket",
        "cache_bytes",
        "endpoint",
        "prefetch",
        "prefix",
        "read_only",
        "region",
        "url",
    )
)
# Options of a bucket that are secrets, and the variable that each is read from.
CREDENTIALS = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}
_ENTRY = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)[ \t]*=[ \t]*
    (?:'(?P<literal>[^']*)' | "(?P<quoted>(?:[^"\\]|\\.)*)" | (?P<plain>[^\n]*?))
    [ \t]*(?:(?<=\s)\#[^\n]*|(?<=['"])\#[^\n]*)?(?:\n|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_BLANK = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}

# Directory of the project that the running code belongs to. None: the working directory.
project_folder: ContextVar[Path | None] = ContextVar("smokebox_project_folder", default=None)


class Secrets:
    """Secrets by attribute: `secrets.GITHUB_TOKEN`. The file is read at each access.

    A variable of this process overrides one in `.env`. They stay in this process: nothing here
    is ever written into a sandbox.

    Args:
        folder: Directory of the project or below it. Defaults to the working directory.
        file: The `.env` file, where it is not the one of the project.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, file: Path | None = None
    ) -> None:
        self._folder = folder
        self._file = file

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return value

    def get(self, name: str) -> str | None:
        """Return the value of a variable; None when it is unset or empty."""
        return os.environ.get(name) or self._read().get(name) or None

    def missing(self, name: str) -> InvalidOption:
        """Return the error for a variable that is not set."""
        return InvalidOption(
            f"the secret {name} is not set: neither in the environment nor in {self.file}.",
            hint=f"Write {name}=... into that file, or export it before the program starts.",
            option=name,
        )

    @property
    def file(self) -> Path:
        """The `.env` file that is read. It may not exist."""
        if self._file is not None:
            return self._file
        folder = Path(self._folder or Path.cwd()).absolute()
        config = _find_config(folder)
        return (folder if config is None else config.parent) / SECRETS_FILE

    def __repr__(self) -> str:
        return f"<Secrets of the environment and {self.file}>"

    def _read(self) -> dict[str, str]:
        file = self.file
        try:
            text = file.read_text()
        except (FileNotFoundError, IsADirectoryError):
            return {}
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InvalidOption(
                f"{file} cannot be read: {reason}.", hint="Fix the file.", option=str(file)
            ) from None
        return parse_dotenv(text, str(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """Tables of the configuration file nearest to `start`, upwards.

    `file` is None, and all tables are empty, when there is no such file.
    """

    file: Path | None
    start: Path
    sandboxes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    app: Mapping[str, Any] = field(default_factory=dict)

    @property
    def secrets(self) -> Secrets:
        """The secrets of the project."""
        folder = self.start if self.file is None else self.file.parent
        return Secrets(file=folder / SECRETS_FILE)


def load_config(start: Path | None = None) -> ProjectConfig:
    """Read the nearest configuration file from a directory upwards.

    Args:
        start: Defaults to `project_folder`, else to the working directory.

    Raises:
        InvalidOption: The file is not TOML, or has an unknown table or option.
    """
    folder = (start or project_folder.get() or Path.cwd()).absolute()
    file = _find_config(folder)
    if file is None:
        return ProjectConfig(file=None, start=folder)
    content = read_toml(file)
    tables = content["tool"]["smokebox"] if file.name == PYPROJECT else content
    refuse_unknown(str(file), tables, _TABLES)
    return ProjectConfig(
        file=file,
        start=folder,
        sandboxes=_tables(file, "sandboxes", tables),
        buckets=_check_buckets(file, _tables(file, "buckets", tables)),
        models=_tables(file, "models", tables),
        app=_table(file, "app", tables.get("app", {})),
    )


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        InvalidOption: It is not TOML.
    """
    import tomllib

    try:
        return tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"{file} is not TOML: {error}.", hint="Fix that line.", option=str(file)
        ) from error


def parse_dotenv(text: str, file: str = SECRETS_FILE) -> dict[str, str]:
    """Parse a `.env` file: `NAME=value`, `export NAME='...'`, `NAME="a\\nb"`, comments.

    Quoted values may span lines.

    Raises:
        InvalidOption: A line is none of these. Names its number, never its content.
    """
    variables: dict[str, str] = {}
    position = 0
    while position < len(text):
        if blank := _BLANK.match(text, position):
            position = blank.end()
            continue
        entry = _ENTRY.match(text, position)
        if entry is None or (entry["plain"] or "").startswith(("'", '"')):
            line = text.count("\n", 0, position) + 1
            raise InvalidOption(
                f"{file}, line {line}, is not NAME=value.",
                hint="Put a value with quotes or line breaks into quotes of the other kind.",
                option=file,
            )
        variables[entry["name"]] = _value(entry)
        position = entry.end()
    return variables


def _value(entry: re.Match[str]) -> str:
    if entry["literal"] is not None:
        return entry["literal"]
    if entry["quoted"] is not None:
        return re.sub(
            r"\\(.)",
            lambda escape: _ESCAPES.get(escape[1], escape[1]),
            entry["quoted"],
            flags=re.DOTALL,
        )
    return entry["plain"].strip()


def _find_config(start: Path) -> Path | None:
    for folder in (start, *start.parents):
        if (own := folder / CONFIG_FILE).is_file():
            return own
        if (shared := folder / PYPROJECT).is_file() and "smokebox" in read_toml(shared).get(
            "tool", {}
        ):
            return shared
    return None


def _check_buckets(
    file: Path, buckets: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    for name, options in buckets.items():
        where = f"{file}: [buckets.{name}]"
        for option in CREDENTIALS.keys() & options:
            raise InvalidOption(
                f"{where}: {option} is a secret, which does not belong in this file.",
                hint=f"Write {CREDENTIALS[option]}=... into {file.parent / SECRETS_FILE}.",
                option=option,
            )
        refuse_unknown(where, options, _BUCKET_OPTIONS)
        if sum(isinstance(options.get(key), str) for key in ("url", "bucket")) != 1:
            raise InvalidOption(
                f"{where}: a bucket has either url or bucket.",
                hint='Write bucket = "my-data", or url = "s3://my-data/folder".',
                option="bucket",
            )
    return buckets


def _tables(file: Path, key: str, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    outer = _table(file, key, tables.get(key, {}))
    return {name: _table(file, f"{key}.{name}", value) for name, value in outer.items()}


def _table(file: Path, key: str, value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise InvalidOption(
        f"{file}: {key} is a table, not {value!r}.",
        hint=f"Write [{key}] on a line of its own, and its settings below.",
        option=key,
        value=value,
    )
