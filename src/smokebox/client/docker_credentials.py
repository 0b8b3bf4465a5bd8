"""Credentials for container registries, as `docker login` and credential helpers keep them.

They are read where the SDK or the command line runs, and sent to the server for one pull or push.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from smokebox.errors import InvalidOption
from smokebox.foundation.registry_names import (
    DOCKER_HUB,
    DOCKER_HUB_CONFIG_KEY,
    explicit_registry,
    registry_of_key,
)
from smokebox.wire.requests import RegistryCredentials

CONFIG_DIRECTORY = "DOCKER_CONFIG"
_HELPER_SECONDS = 30.0
_MAX_CONFIG = 4 << 20
_MAX_OUTPUT = 1 << 20
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The user name by which helpers say that the secret is an identity token.
_IDENTITY = "<token>"


def registry_of(image: str) -> str:
    """Return the registry that an image reference names, by default Docker Hub."""
    return explicit_registry(image) or DOCKER_HUB


async def find_credentials(registry: str) -> RegistryCredentials | None:
    """Return the user's credentials for a registry, or None if there are none.

    Reads `config.json` of the directory DOCKER_CONFIG, by default `~/.docker`, and runs the
    credential helper that it names.

    Raises:
        InvalidOption: The file is damaged, or the helper fails.
    """
    config = await asyncio.to_thread(_read_config)
    helper = _helper_of(config, registry)
    if helper is not None:
        return await _run_helper(helper, registry)
    for key, entry in _table(config, "auths").items():
        if registry_of_key(key) == registry and isinstance(entry, dict):
            found = _parse_entry(registry, entry)
            if found is not None:
                return found
    return None


def _config_path() -> Path:
    directory = os.environ.get(CONFIG_DIRECTORY)
    return (Path(directory) if directory else Path.home() / ".docker") / "config.json"


def _read_config() -> dict[str, Any]:
    path = _config_path()
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise _invalid(
            f"{path} cannot be read: {reason}.", "Correct it, or move it away."
        ) from None
    if not isinstance(config, dict):
        raise _invalid(f"{path} is not a JSON object.", "Correct it, or move it away.")
    return config


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}


def _helper_of(config: dict[str, Any], registry: str) -> str | None:
    for key, helper in _table(config, "credHelpers").items():
        if registry_of_key(key) == registry and isinstance(helper, str):
            return helper
    store = config.get("credsStore")
    return store if isinstance(store, str) and store else None


async def _run_helper(helper: str, registry: str) -> RegistryCredentials | None:
    program = f"docker-credential-{helper}"
    path = shutil.which(program) if _HELPER.fullmatch(helper) else None
    if path is None:
        raise _invalid(
            f"the credential helper {program!r:.100} is not installed.",
            f"Install it, or remove it from {_config_path()}.",
        )
    key = DOCKER_HUB_CONFIG_KEY if registry == DOCKER_HUB else registry
    process = await asyncio.create_subprocess_exec(
        path,
        "get",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        limit=_MAX_OUTPUT,
    )
    try:
        async with asyncio.timeout(_HELPER_SECONDS):
            output, _ = await process.communicate(key.encode())
    except TimeoutError:
        raise _invalid(
            f"the credential helper {program} does not respond.",
            f"Run `echo {key} | {program} get` to see why.",
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        # Also if it has none, which is no error: the image may be public.
        if b"not found" in output or not output.strip():
            return None
        raise _invalid(
            f"the credential helper {program} failed for {registry}.",
            f"Run `echo {key} | {program} get` to see why.",
        )
    return _parse_output(program, registry, output)


def _parse_output(program: str, registry: str, output: bytes) -> RegistryCredentials:
    try:
        found = json.loads(output)
        username, secret = found["Username"], found["Secret"]
    except (ValueError, KeyError, TypeError, RecursionError):
        username = secret = None
    if not isinstance(username, str) or not isinstance(secret, str):
        # The output may hold a secret, so it is not shown.
        raise _invalid(
            f"the credential helper {program} did not print Username and Secret.",
            "Update or replace it.",
        )
    if username == _IDENTITY:
        return RegistryCredentials(registry=registry, identity_token=secret)
    return RegistryCredentials(registry=registry, username=username, password=secret)


def _parse_entry(registry: str, entry: dict[str, Any]) -> RegistryCredentials | None:
    texts = {name: value for name, value in entry.items() if isinstance(value, str) and value}
    username, password = texts.get("username", ""), texts.get("password", "")
    if "auth" in texts:
        try:
            pair = base64.b64decode(texts["auth"], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise _invalid(
                f"{_config_path()}: auth of {registry} is not base64.",
                f"Run `docker login {registry}` again.",
            ) from None
        username, _, password = pair.rstrip("\0").partition(":")
    found = RegistryCredentials(
        registry=registry,
        username=username,
        password=password,
        identity_token=texts.get("identitytoken", ""),
        registry_token=texts.get("registrytoken", ""),
    )
    return found if found != RegistryCredentials(registry=registry, username=username) else None


def _invalid(message: str, hint: str) -> InvalidOption:
    return InvalidOption(message, hint=hint, option="credentials")
