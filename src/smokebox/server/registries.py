"""The tables `[registries]` of `server.toml`: mirrors, plain HTTP and the server's credentials."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from smokebox.engine.images.registry.access import RegistryConfig, RegistrySettings
from smokebox.engine.images.registry.reference import check_registry
from smokebox.errors import InvalidOption
from smokebox.foundation.registry_names import DOCKER_HUB, normal_registry
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPTIONS = ("mirror", "password_file", "plain_http", "username")
_DEFAULT = "default"


def parse_registries(where: str, table: Mapping[str, Any]) -> RegistrySettings:
    """Return the settings of a table. `where` names the file in errors.

    Raises:
        InvalidOption: A name is unknown, or a value is not valid.
    """
    default = _registry(f"{where}: registries.default", table.get(_DEFAULT, DOCKER_HUB))
    registries: dict[str, RegistryConfig] = {}
    for name, value in table.items():
        if name == _DEFAULT:
            continue
        option = f"{where}: [registries.{name!r}]"
        if not isinstance(value, dict):
            _refuse(option, value, "is a table", f'Write [registries."{name}"] on its own line.')
        registries[_registry(option, name)] = _config(option, value)
    return RegistrySettings(default=default, registries=registries)


def _config(where: str, table: Mapping[str, Any]) -> RegistryConfig:
    refuse_unknown(where, table, _OPTIONS)
    plain_http = table.get("plain_http", False)
    if not isinstance(plain_http, bool):
        _refuse(f"{where} plain_http", plain_http, "is true or false", "Leave it out for TLS.")
    mirrors = table.get("mirror", [])
    mirrors = [mirrors] if isinstance(mirrors, str) else mirrors
    if not isinstance(mirrors, list):
        _refuse(f"{where} mirror", mirrors, "is a registry or a list of them", 'Write "host:5000".')
    username, file = table.get("username"), table.get("password_file")
    if (username is None) != (file is None):
        _refuse(
            f"{where} username",
            username,
            "comes with password_file",
            "Write both, or leave both out.",
        )
    if username is not None and (not isinstance(username, str) or ":" in username):
        _refuse(f"{where} username", username, "is text without a colon", "Correct it.")
    if file is not None and not (
        isinstance(file, str) and os.path.isabs(file) and os.path.isfile(file)
    ):
        hint = "Write the absolute path of a file that holds the password alone."
        _refuse(f"{where} password_file", file, "is an existing file", hint)
    return RegistryConfig(
        mirrors=tuple(_registry(f"{where} mirror", one) for one in mirrors),
        plain_http=plain_http,
        username=username,
        password_file=file,
    )


def _registry(option: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(option, value, "is the name of a registry", 'Write "images.example.com:5000".')
    return normal_registry(check_registry(option, value))


def _refuse(option: str, value: object, wanted: str, hint: str) -> NoReturn:
    raise InvalidOption(
        f"{option} {wanted}, not {value!r:.200}.", hint=hint, option=option, value=value
    )
