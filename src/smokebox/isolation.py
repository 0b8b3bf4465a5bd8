"""Isolation tiers of Linux sandboxes: one table that options, CLI, docs and `doctor` read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

Tier = Literal["namespaces", "gvisor"]
DEFAULT_TIER: Tier = "namespaces"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInfo:
    """Description of a tier, and the program that the host needs for it.

    `program_variable` is the environment variable that overrides the program. Its releases before
    `oldest`, a date such as 20240729, start but have the `flaw`.
    """

    summary: str
    program: str | None = None
    program_variable: str = ""
    install_url: str | None = None
    oldest: int = 0
    flaw: str = ""


# To add a tier: an entry here and in `Tier`, a Jailer in engine/jail/, and a column in
# docs/isolation.md.
TIERS: Mapping[Tier, TierInfo] = {
    "namespaces": TierInfo(summary="the host's kernel, in namespaces"),
    "gvisor": TierInfo(
        summary="gVisor, a kernel in user space",
        program="runsc",
        program_variable="SMOKEBOX_RUNSC",
        install_url="https://gvisor.dev/docs/user_guide/install/",
        # Of Debian 13. That of Debian 12 has the flaw, and those between were not tested.
        oldest=20240729,
        flaw="`ls` and `stat` of coreutils 9 fail with EINVAL in images such as debian:13",
    ),
}


def check_tier(value: object) -> Tier:
    """Return `value` if it names a tier.

    Raises:
        InvalidOption: It does not.
    """
    if isinstance(value, str) and value in TIERS:
        return cast("Tier", value)
    raise InvalidOption(
        f"there is no tier {value!r}.",
        hint=f"The tiers are {' and '.join(map(repr, TIERS))}.",
        option="tier",
        value=value,
    )
