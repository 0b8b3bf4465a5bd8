"""The seam between a sandbox and what isolates it, described by data.

A tier is a `Jailer`, which makes `Jail`s from a `JailSpec` and finds them again by the
`JailState` that it gave. Nothing above this file knows which tier it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from smokebox.engine.images.image import Layer
    from smokebox.engine.jail.network import EgressSockets
    from smokebox.isolation import Tier
    from smokebox.limits import Limits

Enforcement = Literal["cgroup-v2", "cgroup-v1", "rlimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JailSpec:
    """What a jail is made from.

    `key` names it on this host, in its cgroup and its directory. `directory` is the host's
    side: `upper` and `work` hold what the sandbox wrote, by target of the layers, `run` its
    sockets, logs and pipes. `run/io` is seen inside at `/run/smokebox`, read-only.
    """

    key: str
    directory: str
    layers: tuple[Layer, ...]
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class JailState:
    """What finds a running jail again after a crash. Every value fits in JSON."""

    tier: Tier
    key: str
    pid: int
    started: int
    first_uid: int
    uids: int
    enforcement: Enforcement
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who root inside is outside, and how many ids follow it (1 where none do)."""

    uid: int
    gid: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JailStats:
    """What a jail uses; None where nobody counts it."""

    cpu_seconds: float | None = None
    memory: int | None = None
    memory_peak: int | None = None
    pids: int | None = None
    oom_kills: int | None = None


class Jail(Protocol):
    """One isolated Linux. What comes out of it is hostile, whatever it says."""

    @property
    def state(self) -> JailState:
        """What `Jailer.adopt` needs to find it again."""
        ...

    @property
    def owner(self) -> Owner:
        """Whose files these are, seen from outside."""
        ...

    @property
    def root(self) -> int:
        """An O_PATH descriptor of the root directory; open below it with openat2 only."""
        ...

    @property
    def egress_sockets(self) -> EgressSockets:
        """The sockets that lead out of it, closed with it."""
        ...

    @property
    def alive(self) -> bool:
        """Whether its first process runs, and shall: not from the moment that it is killed."""
        ...

    async def enter(self, hostname: str, limits: Limits) -> None:
        """Give a jail that waits in the pool its name and limits, and lock its door behind it.

        Once it returns, the jail outlives this process.
        """
        ...

    async def connect(self) -> socket.socket:
        """A non-blocking control socket to one supervisor, as `keeper` and `agent` speak it."""
        ...

    async def wait(self) -> None:
        """Return when its first process has ended."""
        ...

    async def freeze(self) -> None:
        """Stop every process in it."""
        ...

    @property
    def frozen(self) -> bool:
        """Whether this engine has stopped it, so that it does not answer."""
        ...

    async def thaw(self) -> None:
        """Let them go on."""
        ...

    async def stats(self) -> JailStats:
        """What it uses at this moment."""
        ...

    async def set_limits(self, limits: Limits) -> None:
        """Hold it to other limits from here on."""
        ...

    async def kill(self) -> None:
        """Kill everything in it, wait until it is gone, and remove its cgroup. Safe to repeat."""
        ...

    def close(self) -> None:
        """Let go of descriptors and leave it running, for another engine to adopt."""
        ...


class Jailer(Protocol):
    """A tier: how jails are made on this host."""

    @property
    def tier(self) -> Tier:
        """Its name."""
        ...

    async def make(
        self, spec: JailSpec, *, known: Callable[[JailState], Awaitable[object]] | None = None
    ) -> Jail:
        """A jail that waits for `enter`; until then it dies with this process.

        `known` is called as soon as it can be told from others, and awaited while it is built.
        """
        ...

    async def adopt(self, spec: JailSpec, state: JailState) -> Jail | None:
        """The running jail of another engine's time, or None when it is gone."""
        ...

    async def aclose(self) -> None:
        """Stop what makes jails. Entered jails run on."""
        ...
