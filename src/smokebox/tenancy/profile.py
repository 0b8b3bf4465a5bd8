"""Profiles: the ceilings of tenants' keys, from the tables `[profiles.NAME]` of `server.toml`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from smokebox.egress.pattern import HostPattern
from smokebox.errors import InvalidOption
from smokebox.isolation import check_tier
from smokebox.limits import Limits, parse_size
from smokebox.options import refuse_unknown
from smokebox.tenancy.networks import parse_networks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.isolation import Tier

DEFAULT_PROFILE = "default"
UNLIMITED = "unlimited"

_LIMITS = tuple(one.name for one in fields(Limits))
# Totals of what the sandboxes of a key may take, by the limit of one sandbox that they sum up.
TOTALS = {"total_cpu": "cpu", "total_memory": "memory", "total_disk": "disk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Ceilings of the keys with this profile. A ceiling that is None is no ceiling.

    Attributes:
        images: Names of images, or globs of names.
        tier: Lowest isolation tier; None for the server's default tier.
        limits: Greatest limits of one sandbox.
        sandboxes: Number of sandboxes, asleep or not.
        total_cpu, total_memory, total_disk: Sums of the limits of all sandboxes, asleep or not.
            The last one includes the snapshots of destroyed sandboxes.
        tenant_cpu: Cores that all sandboxes of a tenant use together at any moment.
        total_images: Bytes of images, of layers and caches of builds, and of uploaded contents.
        backups: Number of backups.
        snapshots: Number of snapshots.
        rate: Requests per second of each key; None for that of the server.
        concurrency: Concurrent requests of each key; None for that of the server.
        sleep_after: Longest idle time of a sandbox in seconds. It also refuses `keep_alive`.
        lifetime: Longest time in seconds from the creation of a sandbox to its destruction.
        egress: Hosts that policies may open; None for every public host.
        private: Networks that are not public and may be reached, besides those that the server
            grants to every key.
    """

    name: str = DEFAULT_PROFILE
    images: tuple[str, ...] = ("*",)
    tier: Tier | None = None
    limits: Limits = field(default_factory=Limits)
    sandboxes: int | None = None
    tenant_cpu: float | None = None
    total_cpu: float | None = None
    total_memory: int | None = None
    total_disk: int | None = None
    total_images: int | None = None
    backups: int | None = None
    snapshots: int | None = None
    rate: float | None = None
    concurrency: int | None = None
    sleep_after: float | None = None
    lifetime: float | None = None
    egress: tuple[HostPattern, ...] | None = None
    private: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Return the ceilings of one sandbox or request, by their names in `server.toml`."""
        return {
            **self.limits.to_json(),
            "images": list(self.images),
            "tier": self.tier,
            "sleep_after": self.sleep_after,
            "lifetime": self.lifetime,
            "tenant_cpu": self.tenant_cpu,
            "rate": self.rate,
            "concurrency": self.concurrency,
            "private": list(self.private),
            "egress": None if self.egress is None else [one.text for one in self.egress],
        }

    def setting(self, ceiling: str) -> str:
        """Return the place in `server.toml` that sets a ceiling, for errors."""
        return f"`{ceiling}` in [profiles.{self.name}] of the server's server.toml"


_OPTIONS = frozenset(
    {one.name for one in fields(Profile)} - {"name", "limits"} | {*_LIMITS},
)


def parse_profile(where: str, name: str, table: Mapping[str, Any]) -> Profile:
    """Return the profile of a table. `where` names the table in errors.

    Raises:
        InvalidOption: A name is unknown, or a value is not valid.
    """
    refuse_unknown(where, table, _OPTIONS)
    values: dict[str, Any] = {"name": name}
    limits: dict[str, Any] = {}
    for option, value in table.items():
        unlimited = value == UNLIMITED
        try:
            if option in _LIMITS:
                limits[option] = None if unlimited else value
            elif option in ("images", "egress"):
                values[option] = None if unlimited else _names(option, value)
            elif option == "private":
                values[option] = parse_networks(option, value)
            elif option == "tier":
                values[option] = check_tier(value)
            else:
                values[option] = None if unlimited else _number(option, value)
        except InvalidOption as error:
            raise _invalid(where, option, value, f"{error.message} {error.hint}") from error
    if values.get("images", ()) is None:
        values["images"] = ("*",)
    if (together := values.get("tenant_cpu")) is not None:
        # In version 1 the kernel has no member of a group with a higher limit.
        cpu = limits.get("cpu")
        limits["cpu"] = together if cpu is None else cpu
        if isinstance(cpu, int | float) and cpu > together:
            raise _invalid(where, "cpu", cpu, f"cpu is above tenant_cpu, which is {together:g}.")
    try:
        ceilings = Limits(**limits)
    except InvalidOption as error:
        raise _invalid(where, "limits", limits, f"{error.message} {error.hint}") from error
    for total, limit in TOTALS.items():
        if values.get(total) is not None and getattr(ceilings, limit) is None:
            raise InvalidOption(
                f"{where}: {total} needs {limit}, the most that one sandbox may have.",
                hint=f"Add {limit} = ... to the table.",
                option=total,
                value=values[total],
            )
    return Profile(**values, limits=ceilings)


def _names(option: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise InvalidOption(f"{option} is a list of names, not {value!r}.", hint="", option=option)
    if option == "egress":
        return tuple(HostPattern.parse(option, one) for one in value)
    return tuple(value)


def _number(option: str, value: object) -> float:
    if option in ("total_memory", "total_disk", "total_images"):
        value = parse_size(value, option)
    whole = option not in ("tenant_cpu", "total_cpu", "rate", "sleep_after", "lifetime")
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
        wanted = "a positive whole number" if whole else "a positive number"
        raise InvalidOption(f"{option} is {wanted}, not {value!r}.", hint="", option=option)
    return value


def _invalid(where: str, option: str, value: object, problem: str) -> NoReturn:
    raise InvalidOption(
        f"{where}: {problem.strip()}",
        hint=f'Fix that value; "{UNLIMITED}" is no ceiling.',
        option=option,
        value=value,
    )
