"""What a file of a project needs beside itself, looked for before anybody asks for its work."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from smokebox.app.located import env_names, place_of
from smokebox.client.bindings import Environment
from smokebox.errors import InvalidOption, SmokeboxError

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.app.served import ServedAgent, ServedFunction


def check_needs(served: ServedAgent | ServedFunction, folder: Path) -> None:
    """Raise `InvalidOption`, with file and line, for a binding or a secret that is not there."""
    env = Environment(folder)
    for name, line in env_names(served.file).items():
        _find(env, name, f"{served.file}, line {line}")
    signature = served.trigger.signature
    if signature is not None:
        where = place_of(served.file, "triggers")
        secret = str(_find(env, signature.secret, where))
        if signature.preset == "standard" and not _is_base64(secret.removeprefix("whsec_")):
            raise InvalidOption(
                f"{where}: the secret {signature.secret} is not base64.",
                hint="Write it as its sender shows it: whsec_...",
                option=signature.secret,
            )


def _find(env: Environment, name: str, where: str) -> object:
    try:
        value: object = getattr(env, name)
    except AttributeError:
        return None
    except SmokeboxError as error:
        raise InvalidOption(f"{where}: {error.message}", hint=error.hint, option=name) from None
    return value


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except ValueError:
        return False
