"""How a sandbox is asked to be: by keywords, by the attributes of a class, or by a binding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from smokebox.egress.handler import CLIENT, Handler, HandlerOption
from smokebox.egress.layers import CATCH_ALL, split_handlers
from smokebox.egress.policy import Egress, handler_key
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown
from smokebox.wire import requests
from smokebox.wire.requests import Settings


class SandboxSettings(TypedDict, total=False):
    """What `get_sandbox` takes by keyword; what is left out stays as it is.

    `limits` is an instance type by name, or numbers by name. `sleep_after` is seconds, or
    "30s", "10m", "2h" without a call, after which the sandbox sleeps unless `keep_alive`.
    An `ephemeral` one forgets its files when it does. From `internet` on they say what the
    sandbox may reach, as in `smokebox.egress.Egress`; of these None is the default again.
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
    internet: bool | None
    allowed_hosts: Sequence[str] | None
    denied_hosts: Sequence[str] | None
    outbound_by_host: Mapping[str, HandlerOption] | None
    outbound: HandlerOption | None
    tcp: Sequence[str] | None
    pass_through: Sequence[str] | None
    hosts: Mapping[str, str] | None
    scrub: bool | None
    max_requests: int | None
    max_bytes: int | None
    requests_per_second: float | None


NAMES = frozenset(Settings.__struct_fields__)
NETWORK = frozenset(requests.Egress.__struct_fields__)
_OUTBOUND = "outbound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Settings as they are sent, and the handlers that stay in this process, by slot."""

    settings: Settings
    handlers: Mapping[str, Handler] = field(default_factory=dict)

    def over(self, other: Asked) -> Asked:
        """Both, where these win."""
        given = {
            name: value
            for name in NAMES
            if (value := getattr(self.settings, name)) is not msgspec.UNSET
            and (value is not None or name in NETWORK)
        }
        settings = msgspec.structs.replace(other.settings, **given)
        both = {**other.handlers, **self.handlers}
        wanted = _slots(settings)
        return Asked(
            settings=settings, handlers={slot: both[slot] for slot in wanted if slot in both}
        )


def parse_settings(where: str, given: Mapping[str, object]) -> Asked:
    """Settings whose names and kinds are right; what they mean is for the server to check.

    What they say of the network is checked here: handlers are of this process.
    """
    refuse_unknown(where, given, NAMES)
    check_network(given)
    split = split_handlers(given)
    plain = {
        name: dict(one) if isinstance(one, Mapping) else one for name, one in split.settings.items()
    }
    try:
        settings = msgspec.convert(plain, Settings)
    except msgspec.ValidationError as error:
        what, _, path = str(error).removesuffix("`").partition(" - at `$.")
        option = path.partition("[")[0]
        raise InvalidOption(
            f"{where}: {option}: {what[:1].lower()}{what[1:]}.",
            hint="See the settings of a sandbox: help(smokebox.get_sandbox).",
            option=option,
            value=plain.get(option),
        ) from error
    handlers = {slot: one for slot, one in split.handlers.items() if not isinstance(one, str)}
    return Asked(settings=settings, handlers=handlers)


def check_network(given: Mapping[str, Any]) -> None:
    """Raise `InvalidOption` for what makes no policy."""
    policy = {name: one for name, one in given.items() if name in NETWORK and one is not None}
    if policy:
        Egress(**policy)


def declared(kind: type) -> dict[str, Any]:
    """The settings that a class has as attributes, without those of its parents.

    A function under the name of a setting is a handler, and no method. Raises
    `InvalidOption` for an attribute that is data, and no setting.
    """
    own = {
        name: _function(value)
        for name, value in vars(kind).items()
        if name == _OUTBOUND or _is_data(name, value)
    }
    refuse_unknown(f"class {kind.__name__}", own, NAMES)
    if "cwd" in own:
        # The handle's own answers, once the sandbox is there.
        delattr(kind, "cwd")
    return own


def _slots(settings: Settings) -> list[str]:
    """The slots for which settings ask for a handler of the client."""
    by_host = settings.outbound_by_host or {}
    slots = [handler_key(name) for name, one in by_host.items() if one == CLIENT]
    return [*slots, CATCH_ALL] if settings.outbound == CLIENT else slots


def _function(value: object) -> object:
    return value.__func__ if isinstance(value, staticmethod) else value


def _is_data(name: str, value: object) -> bool:
    return not (name.startswith("_") or isinstance(value, type) or hasattr(value, "__get__"))
