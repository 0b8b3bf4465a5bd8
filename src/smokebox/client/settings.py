"""How a sandbox is asked to be: by keywords, by the attributes of a class, or by a binding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown
from smokebox.wire.requests import Settings


class SandboxSettings(TypedDict, total=False):
    """What `get_sandbox` takes by keyword; what is left out stays as it is.

    `limits` is an instance type by name, or numbers by name. `sleep_after` is seconds, or
    "30s", "10m", "2h" without a call, after which the sandbox sleeps unless `keep_alive`.
    An `ephemeral` one forgets its files when it does.
    """

    image: str | None
    tier: str | None
    limits: str | Mapping[str, object] | None
    env: Mapping[str, str] | None
    labels: Mapping[str, str] | None
    sleep_after: float | str | None
    keep_alive: bool | None
    ephemeral: bool | None
    cwd: str | None
    user: str | None


NAMES = frozenset(Settings.__struct_fields__)


def parse_settings(where: str, given: Mapping[str, object]) -> Settings:
    """Settings whose names and kinds are right; what they mean is for the server to check."""
    refuse_unknown(where, given, NAMES)
    plain = {name: dict(one) if isinstance(one, Mapping) else one for name, one in given.items()}
    try:
        return msgspec.convert(plain, Settings)
    except msgspec.ValidationError as error:
        what, _, field = str(error).removesuffix("`").partition(" - at `$.")
        option = field.partition("[")[0]
        raise InvalidOption(
            f"{where}: {option}: {what[:1].lower()}{what[1:]}.",
            hint="See the settings of a sandbox: help(smokebox.get_sandbox).",
            option=option,
            value=plain.get(option),
        ) from error


def over(settings: Settings, other: Settings) -> Settings:
    """Both, where the first win."""
    asked = {name: one for name in NAMES if (one := getattr(settings, name)) is not None}
    return msgspec.structs.replace(other, **asked)


def declared(kind: type) -> dict[str, Any]:
    """The settings that a class has as attributes, without those of its parents.

    Raises `InvalidOption` for an attribute that is data, and no setting.
    """
    own = {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and not isinstance(value, type)
        and not hasattr(value, "__get__")
    }
    refuse_unknown(f"class {kind.__name__}", own, NAMES)
    if "cwd" in own:
        # The handle's own answers, once the sandbox is there.
        delattr(kind, "cwd")
    return own


def _is_data(name: str, value: object) -> bool:
    return not (name.startswith("_") or isinstance(value, type) or hasattr(value, "__get__"))
