"""Settings of a sandbox: keywords, attributes of a subclass, and bindings, checked and merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import msgspec

from smokebox.client.image import Image, absolute_image
from smokebox.egress.handler import CATCH_ALL, CLIENT, Handler
from smokebox.egress.layers import split_handlers
from smokebox.egress.policy import Egress, EgressOption, handler_key, moved_options, parse_egress
from smokebox.errors import InvalidOption
from smokebox.limits import Limits, limits_to_json
from smokebox.options import refuse_unknown
from smokebox.wire.requests import Settings


class SandboxSettings(TypedDict, total=False):
    """Keywords of `get_sandbox`. A setting that is omitted or None keeps its value.

    Attributes:
        image: Root filesystem: "host", a reference to an image such as "python:3.12-slim", the name
            or digest of an image of the server, "dir:NAME" for a directory of its operator, one to
            build: an `Image`, or the path of a Dockerfile or its directory that starts with "./",
            "../" or "/", or one to load: "oci:DIR" or "archive:FILE".
        tier: Isolation tier: "namespaces" or "gvisor".
        limits: A `Limits`, the name of an instance type, or a mapping with names of `Limits`.
        env: Environment variables of all commands.
        labels: Names and values to search by.
        sleep_after: Idle time before it sleeps: seconds, or text such as "30s", "10m", "2h".
        keep_alive: Never sleep by itself.
        lifetime: Time after its creation at which it is destroyed with its files, in use or not:
            seconds, or text such as "30m", "2h", "7d". By default it has no end.
        ephemeral: Delete its files when it sleeps.
        cwd: Absolute directory that commands and relative paths start in.
        user: User that commands run as.
        egress: What it may reach: an `Egress`, or a list of allowed hosts.
        snapshot: Id or name of a snapshot to create it from; `image="snapshot:NAME"` says the same.
        mirrors: Use the package mirrors of the server's host in the build of an `image` that is
            built. `egress` opens their hosts.
        checkpoints: Time between automatic snapshots while it runs, such as "10m", or a mapping of
            `every`, `keep_last` (10) and `keep_for`. False for none, which is the default.
    """

    image: str | Image | None
    tier: str | None
    limits: Limits | str | Mapping[str, object] | None
    env: Mapping[str, str] | None
    labels: Mapping[str, str] | None
    sleep_after: float | str | None
    keep_alive: bool | None
    lifetime: float | str | None
    ephemeral: bool | None
    cwd: str | None
    user: str | None
    egress: EgressOption | None
    snapshot: str | None
    mirrors: bool | None
    checkpoints: bool | float | str | Mapping[str, object] | None


class ClientSettings(Settings):
    """Settings of a sandbox, with those of the build of its image, which the client starts."""

    mirrors: bool | None = None

    def for_server(self) -> Settings:
        """Return the settings that the server takes."""
        return Settings(**{name: getattr(self, name) for name in Settings.__struct_fields__})


NAMES = frozenset(ClientSettings.__struct_fields__)
# A subclass declares handlers as attributes of their own, not within `egress`.
_OUTBOUND = ("outbound", "outbound_by_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedSettings:
    """Settings of a sandbox, and the handlers that stay in this process, by slot."""

    settings: ClientSettings
    handlers: Mapping[str, Handler] = field(default_factory=dict)

    def over(self, other: ParsedSettings) -> ParsedSettings:
        """Return `other` overridden by these settings."""
        settings = msgspec.structs.replace(other.settings, **set_fields(self.settings))
        both = {**other.handlers, **self.handlers}
        wanted = _slots(settings)
        return ParsedSettings(
            settings=settings, handlers={slot: both[slot] for slot in wanted if slot in both}
        )


def set_fields(settings: ClientSettings) -> dict[str, Any]:
    """Return the settings that are not None, by name."""
    return {name: value for name in NAMES if (value := getattr(settings, name)) is not None}


def parse_settings(
    where: str,
    options: Mapping[str, object],
    *,
    moved: Mapping[str, str] | None = None,
    directory: str | None = None,
) -> ParsedSettings:
    """Check names and types of settings; the server checks the values.

    The egress policy is checked here, as its handlers are functions of this process.

    Args:
        where: Prefix of error messages.
        options: Settings by name.
        moved: Hints for names that have moved elsewhere.
        directory: Directory that the path of an image is relative to; by default the current one.

    Raises:
        InvalidOption: A name is unknown or a value has a wrong type.
    """
    refuse_unknown(where, options, NAMES, moved or moved_options())
    plain = {name: _plain(value) for name, value in options.items()}
    image = plain.get("image")
    if isinstance(image, str):
        # The working directory may be another one when the sandbox is created.
        plain["image"] = absolute_image(image, directory or "")
    handlers: dict[str, Handler] = {}
    if (egress := options.get("egress")) is not None:
        split = split_handlers(parse_egress(egress))
        plain["egress"] = split.settings
        handlers = {slot: one for slot, one in split.handlers.items() if not isinstance(one, str)}
    try:
        settings = msgspec.convert(plain, ClientSettings)
    except msgspec.ValidationError as error:
        what, _, path = str(error).removesuffix("`").partition(" - at `$.")
        option = path.partition("[")[0]
        hint = "See help(smokebox.SandboxSettings) for the types of settings."
        if option == "limits":
            hint = 'Pass for example limits=Limits(memory="1GiB"); VirtualLimits is for virtual().'
        raise InvalidOption(
            f"{where}: {option}: {what[:1].lower()}{what[1:]}.",
            hint=hint,
            option=option,
            value=plain.get(option),
        ) from error
    return ParsedSettings(settings=settings, handlers=handlers)


def with_declared(declared: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a class declares, overridden by `options`.

    `outbound` and `outbound_by_host` of the class are added to the policy, whose own
    handlers override them. Raises `InvalidOption` for an invalid policy.
    """
    plain = {name: value for name, value in declared.items() if name not in _OUTBOUND}
    merged = {**plain, **{name: value for name, value in options.items() if value is not None}}
    handlers = {name: declared[name] for name in _OUTBOUND if declared.get(name) is not None}
    if not handlers and "egress" not in merged:
        return merged
    policy, own = parse_egress(merged.get("egress", {})), Egress(**handlers)
    taken = {handler_key(name) for name in policy.outbound_by_host}
    kept = {
        name: one for name, one in own.outbound_by_host.items() if handler_key(name) not in taken
    }
    merged["egress"] = replace(
        policy,
        outbound=own.outbound if policy.outbound is None else policy.outbound,
        outbound_by_host={**kept, **policy.outbound_by_host},
    )
    return merged


def declared(kind: type) -> dict[str, Any]:
    """Return the settings that a class declares as attributes, without those of its parents.

    A function named like a setting is a handler, not a method. Raises `InvalidOption` for a
    data attribute that is not a setting.
    """
    own = {
        name: _function(value)
        for name, value in vars(kind).items()
        if name in ("outbound", "egress") or _is_data(name, value)
    }
    moved = {name: hint for name, hint in moved_options().items() if name not in _OUTBOUND}
    refuse_unknown(f"class {kind.__name__}", own, {*NAMES, *_OUTBOUND}, moved)
    # Keep the handle's `cwd`, which knows the directory of the running sandbox, and `snapshot()`.
    for name in {"cwd", "snapshot"} & own.keys():
        delattr(kind, name)
    return own


def _slots(settings: Settings) -> list[str]:
    """Return the slots whose handlers are functions of the client."""
    egress = settings.egress if isinstance(settings.egress, dict) else {}
    by_host = egress.get("outbound_by_host", {})
    slots = [handler_key(name) for name, one in by_host.items() if one == CLIENT]
    return [*slots, CATCH_ALL] if egress.get("outbound") == CLIENT else slots


def _plain(value: object) -> object:
    if isinstance(value, Limits):
        return limits_to_json(value)
    if isinstance(value, Image):
        return value.name
    return dict(value) if isinstance(value, Mapping) else value


def _function(value: object) -> object:
    return value.__func__ if isinstance(value, staticmethod) else value


def _is_data(name: str, value: object) -> bool:
    return not (name.startswith("_") or isinstance(value, type) or hasattr(value, "__get__"))
