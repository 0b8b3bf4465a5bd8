"""The file `server.toml`, in which the operator grants what tenants may use: its tables.

Servers and apps read the profiles; `smokebox.server.config` reads the tables that only a server
uses.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown
from smokebox.project import read_toml
from smokebox.tenancy.profile import Profile, parse_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "server.toml"
TABLES = ("handlers", "images", "network", "profiles", "registries", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The tables of a `server.toml`. Errors name the file, the table and the value."""

    path: Path
    tables: Mapping[str, Any] = field(default_factory=dict)

    def table(self, name: str, known: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Return a table, empty if the file has none. Raises `InvalidOption`.

        Args:
            name: The table.
            known: The only names that it may have.
        """
        table = self.as_table(name, self.tables.get(name, {}))
        if known is not None:
            refuse_unknown(f"{self.path}: [{name}]", table, known)
        return table

    def as_table(self, name: str, value: object) -> dict[str, Any]:
        """Return a value that must be a table."""
        if isinstance(value, dict):
            return value
        self.refuse(name, value, "is a table", f"Write [{name}] on a line of its own.")

    def profiles(self) -> dict[str, Profile]:
        """Return the profiles by name."""
        return {
            name: parse_profile(f"{self.path}: [profiles.{name}]", name, self.as_table(name, table))
            for name, table in self.table("profiles").items()
        }

    def refuse(self, option: str, value: object, wanted: str, hint: str) -> NoReturn:
        """Raise `InvalidOption` for a value."""
        raise InvalidOption(
            f"{self.path}: {option} {wanted}, not {value!r:.200}.",
            hint=hint,
            option=option,
            value=value,
        )


def open_config(home: str, file: str | None = None) -> ConfigFile:
    """Read a `server.toml`.

    Args:
        home: State directory, whose `server.toml` is read if it exists.
        file: Another file to read instead. It must exist.

    Raises:
        InvalidOption: The file is missing or not TOML, or has an unknown table.
    """
    path = Path(file if file is not None else os.path.join(home, CONFIG_FILE))
    if file is None and not path.exists():
        return ConfigFile(path=path)
    try:
        tables = read_toml(path)
    except OSError as error:
        raise InvalidOption(
            f"{path} cannot be read: {error.strerror}.",
            hint="Pass the path of a file that this user can read.",
            option="config",
            value=str(path),
        ) from error
    refuse_unknown(str(path), tables, TABLES)
    return ConfigFile(path=path, tables=tables)
