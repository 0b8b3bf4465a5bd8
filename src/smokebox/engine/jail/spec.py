"""Descriptions of jails: what one is created from, how it is found again, and its usage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from smokebox.engine.images.image import Layer
    from smokebox.isolation import Tier
    from smokebox.limits import Limits

Enforcement = Literal["cgroup-v2", "cgroup-v1", "rlimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JailSpec:
    """Description of a jail to create.

    `key` names it on this host, in its cgroup and its directory. In `directory`, `data` holds the
    upper and work directories of the overlays, by target of the layers, and `run` its sockets,
    logs and pipes. `run/io` is mounted inside at `/run/smokebox`, read-only. The jails of a `group`
    share the CPU weight of one; it names their cgroup, and "" is no group.
    """

    key: str
    directory: str
    layers: tuple[Layer, ...]
    limits: Limits
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JailState:
    """Data to find a running jail again after a crash. Every value fits in JSON."""

    tier: Tier
    key: str
    pid: int
    started: int
    first_uid: int
    uids: int
    enforcement: Enforcement
    group: str = ""
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Ids on the host of root inside, and the number of ids that follow (1 if none do)."""

    uid: int
    gid: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JailStats:
    """Usage of a jail; None where it is not counted."""

    cpu_seconds: float | None = None
    memory: int | None = None
    memory_peak: int | None = None
    pids: int | None = None
    oom_kills: int | None = None
