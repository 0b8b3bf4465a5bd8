"""The operator's configuration of a server: the one reader of `server.toml`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown
from smokebox.project import read_toml
from smokebox.server.registries import parse_registries
from smokebox.server.tenancy.networks import parse_networks
from smokebox.server.tenancy.profile import Profile, parse_profile

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "server.toml"

_TABLES = ("handlers", "images", "network", "profiles", "registries")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_HANDLER = re.compile(r"[\w.*]+(:[\w.*]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The content of a `server.toml`, under the names of `ServerSettings`."""

    directories: Mapping[str, str] = field(default_factory=dict)
    private_networks: tuple[str, ...] = ()
    handlers: tuple[str, ...] = ()
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    registries: RegistrySettings = field(default_factory=RegistrySettings)


def load_server_config(home: str, file: str | None = None) -> ServerConfig:
    """Read the configuration of a server.

    Args:
        home: State directory, whose `server.toml` is read if it exists.
        file: Another file to read instead. It must exist.

    Raises:
        InvalidOption: The file is missing or not TOML, or has an unknown table, name or value.
    """
    path = Path(file if file is not None else os.path.join(home, CONFIG_FILE))
    if file is None and not path.exists():
        return ServerConfig()
    try:
        tables = read_toml(path)
    except OSError as error:
        raise InvalidOption(
            f"{path} cannot be read: {error.strerror}.",
            hint="Pass the path of a file that this user can read.",
            option="config",
            value=str(path),
        ) from error
    refuse_unknown(str(path), tables, _TABLES)
    network = _table(path, "network", tables, ("private",))
    handlers = _table(path, "handlers", tables, ("allow",))
    return ServerConfig(
        directories=_directories(path, home, _table(path, "images", tables)),
        private_networks=parse_networks(f"{path}: network.private", network.get("private", [])),
        handlers=_handlers(path, handlers),
        profiles={
            name: parse_profile(f"{path}: [profiles.{name}]", name, _as_table(path, name, table))
            for name, table in _table(path, "profiles", tables).items()
        },
        registries=parse_registries(str(path), _table(path, "registries", tables)),
    )


def _table(
    path: Path, name: str, tables: Mapping[str, Any], known: tuple[str, ...] | None = None
) -> dict[str, Any]:
    table = _as_table(path, name, tables.get(name, {}))
    if known is not None:
        refuse_unknown(f"{path}: [{name}]", table, known)
    return table


def _as_table(path: Path, name: str, value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    _refuse(path, name, value, "is a table", f"Write [{name}] on a line of its own.")


def _texts(path: Path, name: str, table: Mapping[str, Any]) -> list[str]:
    value = table.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        _refuse(path, name, value, "is a list of texts", f'Write {name} = ["..."].')
    return value


def _directories(path: Path, home: str, table: Mapping[str, Any]) -> dict[str, str]:
    """Check the host directories that clients may name as images."""
    state = os.path.realpath(home)
    for name, value in table.items():
        option = f"images.{name}"
        if not _NAME.fullmatch(name):
            hint = "Use lowercase letters, digits, '.', '_' and '-'."
            _refuse(path, option, name, "is the name of an image", hint)
        if not isinstance(value, str) or not os.path.isdir(value) or not os.path.isabs(value):
            hint = 'Write the absolute path of a root directory: "/srv/rootfs".'
            _refuse(path, option, value, "is an existing directory", hint)
        found = os.path.realpath(value)
        if os.path.commonpath((found, state)) in (found, state):
            hint = "It would show the files of all sandboxes: use another directory."
            _refuse(path, option, value, f"has nothing in common with {home}", hint)
    return dict(table)


def _handlers(path: Path, table: Mapping[str, Any]) -> tuple[str, ...]:
    names = _texts(path, "allow", table)
    for name in names:
        if not _HANDLER.fullmatch(name) or (":" not in name and "*" not in name):
            hint = 'Write "package.module:name", or "package.*" for all functions below it.'
            _refuse(path, "handlers.allow", name, "is a list of handlers", hint)
    return tuple(names)


def _refuse(path: Path, option: str, value: object, wanted: str, hint: str) -> NoReturn:
    raise InvalidOption(
        f"{path}: {option} {wanted}, not {value!r:.200}.", hint=hint, option=option, value=value
    )
