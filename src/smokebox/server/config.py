"""The tables of `server.toml` that a server uses, under the names of `ServerSettings`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.engine.quota.storage_pool import parse_pool_size
from smokebox.server.registries import parse_registries
from smokebox.tenancy.config import open_config
from smokebox.tenancy.networks import parse_networks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.tenancy.config import ConfigFile
    from smokebox.tenancy.profile import Profile

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
    storage_pool: int | None = None


def load_server_config(home: str, path: str | None = None) -> ServerConfig:
    """Read the configuration of a server.

    Args:
        home: State directory, whose `server.toml` is read if it exists.
        path: Another file to read instead. It must exist.

    Raises:
        InvalidOption: The file is missing or not TOML, or has an unknown table, name or value.
    """
    file = open_config(home, path)
    network = file.table("network", ("private",))
    return ServerConfig(
        directories=_directories(file, home, file.table("images")),
        private_networks=parse_networks(
            f"{file.path}: network.private", network.get("private", [])
        ),
        handlers=_handlers(file, file.table("handlers", ("allow",))),
        profiles=file.profiles(),
        registries=parse_registries(str(file.path), file.table("registries")),
        storage_pool=_pool_size(file, file.table("storage", ("pool",))),
    )


def _directories(file: ConfigFile, home: str, table: Mapping[str, Any]) -> dict[str, str]:
    """Check the host directories that clients may name as images."""
    state = os.path.realpath(home)
    for name, value in table.items():
        option = f"images.{name}"
        if not _NAME.fullmatch(name):
            hint = "Use lowercase letters, digits, '.', '_' and '-'."
            file.refuse(option, name, "is the name of an image", hint)
        if not isinstance(value, str) or not os.path.isdir(value) or not os.path.isabs(value):
            hint = 'Write the absolute path of a root directory: "/srv/rootfs".'
            file.refuse(option, value, "is an existing directory", hint)
        found = os.path.realpath(value)
        if os.path.commonpath((found, state)) in (found, state):
            hint = "It would show the files of all sandboxes: use another directory."
            file.refuse(option, value, f"has nothing in common with {home}", hint)
    return dict(table)


def _pool_size(file: ConfigFile, table: Mapping[str, Any]) -> int | None:
    option = f"{file.path}: storage.pool"
    return parse_pool_size(table["pool"], option) if "pool" in table else None


def _handlers(file: ConfigFile, table: Mapping[str, Any]) -> tuple[str, ...]:
    names = _texts(file, "allow", table)
    for name in names:
        if not _HANDLER.fullmatch(name) or (":" not in name and "*" not in name):
            hint = 'Write "package.module:name", or "package.*" for all functions below it.'
            file.refuse("handlers.allow", name, "is a list of handlers", hint)
    return tuple(names)


def _texts(file: ConfigFile, name: str, table: Mapping[str, Any]) -> list[str]:
    value = table.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        file.refuse(name, value, "is a list of texts", f'Write {name} = ["..."].')
    return value
