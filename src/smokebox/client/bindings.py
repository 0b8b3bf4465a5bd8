"""What a project names in `smokebox.toml`, or in its pyproject.toml, and its secrets.

    [sandboxes.PyBox]
    image = "host"
    limits = "lite"

    [buckets.KNOWLEDGE_BASE]
    bucket = "my-knowledge-base"
    endpoint = "https://s3.example.com"

`from smokebox import env` has them as `get_sandbox(env.PyBox, "user-42")` and
`get_virtual_sandbox(env.KNOWLEDGE_BASE)`. What neither file names is a secret, of the
environment of this process or the `.env` next to the file: `bearer(env.GITHUB_TOKEN)`.
"""

from __future__ import annotations

import difflib
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox.client.settings import parse_settings
from smokebox.egress.environment import FILE as SECRETS
from smokebox.egress.environment import Secrets
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.sandbox.bucket import BucketBinding
    from smokebox.wire.requests import Settings

FILE = "smokebox.toml"
PROJECT = "pyproject.toml"
_TABLES = ("sandboxes", "buckets", "models", "app")
_BUCKET = frozenset(
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
_CREDENTIALS = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


# The project that code belongs to which runs for one; None is that of the working directory.
home: ContextVar[Path | None] = ContextVar("smokebox_home", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A kind of sandbox by its name, and the settings that its sandboxes have."""

    name: str
    settings: Settings
    file: str


class Environment:
    """What a project names, by attribute: `env.PyBox`. The files are read at each access.

    A sandbox is a `Binding`, a bucket a `BucketBinding`, and a secret a str. The project is
    that of `folder`, by default of the working directory.
    """

    __name__ = "env"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        project = load(self._folder)
        if name in project.sandboxes:
            return project.sandboxes[name]
        if name in project.buckets:
            return project.bucket(name)
        secret = project.secrets.get(name)
        if secret is not None:
            return secret
        # Kinds of sandboxes have names like classes, secrets like constants.
        raise project.secrets.missing(name) if name.isupper() else project.unknown(name)

    def get(self, name: str) -> str | None:
        """A secret; None where it is not set."""
        return load(self._folder).secrets.get(name)

    def __dir__(self) -> list[str]:
        project = load(self._folder)
        return sorted([*project.sandboxes, *project.buckets])


@dataclass(frozen=True, slots=True)
class Project:
    """The bindings of one file; of none, where there is no such file from `start` upwards.

    `models` are its providers of models, which `smokebox.agents.providers` understands, and
    `app` says how it is served, as `smokebox.app.settings` understands it.
    """

    file: str | None
    sandboxes: Mapping[str, Binding]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    app: Mapping[str, Any] = field(default_factory=dict)
    start: Path | None = None

    @property
    def secrets(self) -> Secrets:
        """The secrets of the project."""
        folder = self.start or Path.cwd() if self.file is None else Path(self.file).parent
        return Secrets(file=folder / SECRETS)

    def bucket(self, name: str) -> BucketBinding:
        """A bucket, with the credentials of the project where it has some."""
        from smokebox.sandbox.bucket import BucketBinding

        options = dict(self.buckets[name])
        target = options.pop("url", None) or options.pop("bucket")
        keys = {option: self.secrets.get(one) for option, one in _CREDENTIALS.items()}
        if keys["access_key"] and keys["secret_key"]:
            options.update(keys)
        return BucketBinding(name=name, target=target, options=options)  # type: ignore[arg-type]

    def unknown(self, name: str) -> InvalidOption:
        """The error for a name that it does not have."""
        if self.file is None:
            start = self.start or Path.cwd()
            return InvalidOption(
                f"there is no {FILE} that could name {name!r}: none in {start} or above.",
                hint=f"Write one with [sandboxes.{name}], or [tool.smokebox.sandboxes.{name}] "
                f"in {PROJECT}.",
                option=name,
            )
        near = difflib.get_close_matches(name, self.sandboxes, n=1, cutoff=0.5)
        names = ", ".join(sorted(self.sandboxes)) or "none"
        return InvalidOption(
            f"{self.file} names no sandbox {name!r}.",
            hint=f"Did you mean {near[0]!r}?" if near else f"It names: {names}.",
            option=name,
            nearest=near[0] if near else None,
        )


def load(start: Path | None = None) -> Project:
    """The bindings of the nearest file from a directory upwards, by default from `home`."""
    here = (start or home.get() or Path.cwd()).absolute()
    for folder in (here, *here.parents):
        if (own := folder / FILE).is_file():
            return _project(own, _read(own))
        if (shared := folder / PROJECT).is_file():
            table = _read(shared).get("tool", {}).get("smokebox")
            if table is not None:
                return _project(shared, table)
    return Project(None, {}, start=here)


def _project(file: Path, table: Mapping[str, Any]) -> Project:
    refuse_unknown(str(file), table, _TABLES)
    found: dict[str, Binding] = {}
    for name, given in _table(file, "sandboxes", table.get("sandboxes", {})).items():
        where = f"{file}: [sandboxes.{name}]"
        asked = parse_settings(where, _table(file, f"sandboxes.{name}", given))
        found[name] = Binding(name=name, settings=asked.settings, file=str(file))
    models = _table(file, "models", table.get("models", {}))
    return Project(
        str(file),
        found,
        {name: _table(file, f"models.{name}", given) for name, given in models.items()},
        _buckets(file, _table(file, "buckets", table.get("buckets", {}))),
        _table(file, "app", table.get("app", {})),
    )


def _buckets(file: Path, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, given in table.items():
        options = _table(file, f"buckets.{name}", given)
        where = f"{file}: [buckets.{name}]"
        for option in _CREDENTIALS.keys() & options:
            raise InvalidOption(
                f"{where}: {option} is a secret, which has no place in this file.",
                hint=f"Write {_CREDENTIALS[option]}=... into {file.parent / SECRETS}.",
                option=option,
            )
        refuse_unknown(where, options, _BUCKET)
        if sum(isinstance(options.get(one), str) for one in ("url", "bucket")) != 1:
            raise InvalidOption(
                f"{where}: a bucket has one of url and bucket.",
                hint='Write bucket = "my-data", or url = "s3://my-data/folder".',
                option="bucket",
            )
        found[name] = options
    return found


def _table(file: Path, key: str, value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise InvalidOption(
        f"{file}: {key} is a table, not {value!r}.",
        hint=f"Write [{key}] on a line of its own, and its settings below.",
        option=key,
        value=value,
    )


def _read(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"{file} is not TOML: {error}.", hint="Mend that line.", option=str(file)
        ) from error


env = Environment()
