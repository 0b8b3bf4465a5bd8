"""Ceilings: what a tenant asks for is refused above those of its profile.

What it leaves out gets its default, or the ceiling if that is lower. Quotas, which depend on what
exists already, are in `smokebox.server.tenancy.quotas`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

from smokebox.egress.pattern import HostPattern, HostPort
from smokebox.egress.policy import parse_entry
from smokebox.engine.images.registry.reference import is_reference, parse_reference
from smokebox.engine.options import parse_duration
from smokebox.engine.record.rows import RunSettings
from smokebox.errors import Forbidden
from smokebox.isolation import TIERS, check_tier
from smokebox.limits import Limits, parse_limits

if TYPE_CHECKING:
    from smokebox.egress.policy import Egress
    from smokebox.engine.options import CheckedOptions
    from smokebox.isolation import Tier
    from smokebox.server.settings import ServerSettings
    from smokebox.tenancy.principal import Principal

# Limits that the name of an instance type stands for.
_NAMED = frozenset(("cpu", "memory", "disk"))
_DIRECTORY = "dir:"
_DIGEST, _EVERY = "sha256:", "*"


def check_options(
    principal: Principal, options: Mapping[str, Any], settings: ServerSettings
) -> dict[str, Any]:
    """Return the options of a request, with limits up to the ceilings.

    Raises:
        Forbidden: An option is above a ceiling.
    """
    options, profile = dict(options), principal.profile
    if profile is None:
        return options
    if "tier" in options:
        tier, lowest = check_tier(options["tier"]), profile.tier or settings.tier
        if _rank(tier) < _rank(lowest):
            _refuse(principal, "tier", lowest, tier, f"isolates sandboxes by {lowest!r} at least")
    if "limits" in options:
        options["limits"] = _limits(principal, options["limits"])
    longest = profile.sleep_after
    if longest is not None:
        allows = f"lets sandboxes be idle for at most {longest:g} s"
        if options.get("keep_alive"):
            _refuse(principal, "sleep_after", longest, "keep_alive", allows)
        if (
            "sleep_after" in options
            and parse_duration("sleep_after", options["sleep_after"]) > longest
        ):
            _refuse(principal, "sleep_after", longest, options["sleep_after"], allows)
    if "lifetime" in options and profile.lifetime is not None:
        wanted = options["lifetime"]
        if parse_duration("lifetime", wanted) > profile.lifetime:
            allows = f"destroys sandboxes {profile.lifetime:g} s after their creation at the latest"
            _refuse(principal, "lifetime", profile.lifetime, wanted, allows)
    return options


def complete_options(
    principal: Principal,
    options: CheckedOptions,
    settings: ServerSettings,
) -> CheckedOptions:
    """Return the options of a sandbox that is created, with defaults up to the ceilings."""
    profile = principal.profile
    if profile is None:
        return options
    tier = max(options.tier or settings.tier, profile.tier or settings.tier, key=_rank)
    idle = options.sleep_after
    if profile.sleep_after is not None:
        default = RunSettings().sleep_after or profile.sleep_after
        idle = min(idle or default, profile.sleep_after)
    limits = _limits(principal, options.limits or Limits())
    lifetime = options.lifetime
    if profile.lifetime is not None:
        lifetime = min(lifetime or profile.lifetime, profile.lifetime)
    return replace(options, tier=tier, limits=limits, sleep_after=idle, lifetime=lifetime)


def check_egress(principal: Principal, policy: Egress) -> None:
    """Raise `Forbidden` for a policy that opens more than the profile allows."""
    hosts = [
        *(policy.allowed_hosts or ()),
        *(HostPort.parse("tcp", one).host.text for one in policy.tcp),
        *policy.pass_through,
        *(_host_of(address) for address in policy.hosts.values()),
    ]
    handlers = policy.outbound is not None or bool(policy.outbound_by_host)
    check_hosts(principal, hosts, internet=policy.internet, handlers=handlers)


def check_hosts(
    principal: Principal,
    hosts: Iterable[str],
    *,
    internet: bool = False,
    handlers: bool = False,
) -> None:
    """Raise `Forbidden` unless the profile allows to reach all these hosts or globs.

    Handlers are refused where hosts are limited: one may send its request to any host.
    """
    profile = principal.profile
    if profile is None or profile.egress is None:
        return
    names = [one.text for one in profile.egress]
    allows = f"lets sandboxes reach {', '.join(names) or 'no host'} only"
    if internet:
        _refuse(principal, "egress", names, "internet", allows)
    if handlers:
        _refuse(principal, "egress", names, "handlers", allows)
    for host in hosts:
        # Only a "*" of the profile matches this character, which is in no name.
        probe = HostPattern.parse("egress", host).text.replace("*", "\0")
        if not any(one.matches(probe) for one in profile.egress):
            _refuse(principal, "egress", names, host, allows)


def matches_image(image: str, globs: Iterable[str], default: str) -> bool:
    """Return whether a list of names and globs has an image.

    A reference matches however it is spelled: `python` is `docker.io/library/python:latest`.

    Args:
        default: Registry of references that name none.
    """
    names = [image]
    if is_reference(image):
        names = list(parse_reference(image, default).spellings(default))
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


def check_image(principal: Principal, image: object, settings: ServerSettings) -> None:
    """Raise `Forbidden` for an image that the profile does not allow."""
    profile = principal.profile
    if profile is None or not isinstance(image, str):
        return
    directory = image.removeprefix(_DIRECTORY) if image.startswith(_DIRECTORY) else None
    if directory is not None and directory not in settings.directories:
        # The same for every path, so that it does not tell which exist.
        raise Forbidden(
            f"{image!r:.200} is not an image of this server.",
            hint="Host directories as images are named by the operator, in [images] of the "
            "server's server.toml.",
            key=principal.id,
            reason="image",
        )
    if is_digest(image):
        # Its names decide, which the catalog has: see `Quotas.allowed_image`.
        return
    check_image_names(principal, image, [image], settings)


def check_image_names(
    principal: Principal, image: str, names: Iterable[str], settings: ServerSettings
) -> None:
    """Raise `Forbidden` unless the profile allows one of the names of an image."""
    profile, default = principal.profile, settings.registries.default
    if profile is None or _EVERY in profile.images:
        return
    if not any(matches_image(name, profile.images, default) for name in names):
        globs = list(profile.images)
        allows = f"allows the images {', '.join(globs)} only"
        if is_digest(image):
            allows += ", and none of these names refers to it"
        _refuse(principal, "images", globs, image, allows)


def is_digest(image: str) -> bool:
    """Return whether an image is named by its digest alone."""
    return image.startswith(_DIGEST)


def _limits(principal: Principal, value: Limits | str | Mapping[str, object]) -> Limits:
    profile = principal.profile
    assert profile is not None
    wanted = parse_limits(value)
    named: Iterable[str] = _NAMED if isinstance(value, str) else ()
    if isinstance(value, Mapping):
        named = value
    lowered: dict[str, Any] = {}
    for name in (field.name for field in fields(Limits)):
        ceiling, found = getattr(profile.limits, name), getattr(wanted, name)
        if ceiling is None or (found is not None and found <= ceiling):
            continue
        if name in named:
            allows = f"allows at most {name}={ceiling!r} for each sandbox"
            _refuse(principal, name, ceiling, "unlimited" if found is None else found, allows)
        lowered[name] = ceiling
    return Limits(**(asdict(wanted) | lowered))


def _rank(tier: Tier) -> int:
    return list(TIERS).index(tier)


def _host_of(address: str) -> str:
    entry = parse_entry(address)
    return entry.host.text if isinstance(entry, HostPort) else entry.text


def _refuse(
    principal: Principal, ceiling: str, limit: object, value: object, allows: str
) -> NoReturn:
    profile = principal.profile
    assert profile is not None
    raise Forbidden(
        f"{value!r:.200} is above a ceiling of this key: its profile {profile.name!r} {allows}.",
        hint=f"Ask for less, or let the operator change {profile.setting(ceiling)}.",
        key=principal.id,
        reason="ceiling",
        ceiling=ceiling,
        limit=limit,
        value=value,
    )
