"""Bindings: kinds of sandboxes that a project names in `smokebox.toml`, or in its pyproject.toml.

    [sandboxes.PyBox]
    image = "host"
    limits = "lite"

`from smokebox import env` and `get_sandbox(env.PyBox, "user-42")`.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smokebox.client.settings import parse_settings
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.wire.requests import Settings

FILE = "smokebox.toml"
PROJECT = "pyproject.toml"
_TABLES = ("sandboxes", "models")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A kind of sandbox by its name, and the settings that its sandboxes have."""

    name: str
    settings: Settings
    file: str


class Environment:
    """What a project names, by attribute: `env.PyBox`. The file is read at each access."""

    __name__ = "env"

    def __getattr__(self, name: str) -> Binding:
        if name.startswith("__"):
            raise AttributeError(name)
        return load().find(name)

    def __dir__(self) -> list[str]:
        return sorted(load().sandboxes)


@dataclass(frozen=True, slots=True)
class Project:
    """The bindings of one file; of none, where there is no such file above.

    `models` are its providers of models, which `smokebox.agents.providers` understands.
    """

    file: str | None
    sandboxes: Mapping[str, Binding]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def find(self, name: str) -> Binding:
        """The binding of that name. Raises `InvalidOption`."""
        if name in self.sandboxes:
            return self.sandboxes[name]
        if self.file is None:
            raise InvalidOption(
                f"there is no {FILE} that could name {name!r}: none in {Path.cwd()} or above.",
                hint=f"Write one with [sandboxes.{name}], or [tool.smokebox.sandboxes.{name}] "
                f"in {PROJECT}.",
                option=name,
            )
        near = difflib.get_close_matches(name, self.sandboxes, n=1, cutoff=0.5)
        names = ", ".join(sorted(self.sandboxes)) or "none"
        raise InvalidOption(
            f"{self.file} names no sandbox {name!r}.",
            hint=f"Did you mean {near[0]!r}?" if near else f"It names: {names}.",
            option=name,
            nearest=near[0] if near else None,
        )


def load(start: Path | None = None) -> Project:
    """The bindings of the nearest file from a directory upwards, by default from this one."""
    here = (start or Path.cwd()).absolute()
    for folder in (here, *here.parents):
        if (own := folder / FILE).is_file():
            return _project(own, _read(own))
        if (shared := folder / PROJECT).is_file():
            table = _read(shared).get("tool", {}).get("smokebox")
            if table is not None:
                return _project(shared, table)
    return Project(None, {})


def _project(file: Path, table: Mapping[str, Any]) -> Project:
    refuse_unknown(str(file), table, _TABLES)
    found: dict[str, Binding] = {}
    for name, given in _table(file, "sandboxes", table.get("sandboxes", {})).items():
        where = f"{file}: [sandboxes.{name}]"
        settings = parse_settings(where, _table(file, f"sandboxes.{name}", given))
        found[name] = Binding(name=name, settings=settings, file=str(file))
    models = _table(file, "models", table.get("models", {}))
    return Project(
        str(file),
        found,
        {name: _table(file, f"models.{name}", given) for name, given in models.items()},
    )


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
    try:
        return tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"{file} is not TOML: {error}.", hint="Mend that line.", option=str(file)
        ) from error


env = Environment()
