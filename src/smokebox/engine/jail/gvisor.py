"""The stronger tier: jails whose kernel is gVisor's, over the same files and network.

What a program inside calls the kernel is `runsc`, a program on this host, which is itself in
the walls of the default tier. All of it counts against the limits of the sandbox, and out of
memory all of it ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import shutil
from typing import TYPE_CHECKING

from smokebox.engine.jail import namespaces
from smokebox.engine.jail.guest_interpreter import GuestInterpreter, provide
from smokebox.engine.jail.gvisor_setup import INTERPRETER
from smokebox.engine.jail.namespace_setup import IO
from smokebox.engine.jail.zygote_jail import TierRequest, ZygoteJail, ZygoteJailer, hear
from smokebox.errors import IsolationUnavailable, Unsupported
from smokebox.limits import MOST_PIDS

if TYPE_CHECKING:
    import contextlib
    import socket

    from smokebox.engine.jail.api import JailSpec
    from smokebox.errors import SmokeboxError
    from smokebox.isolation import Tier
    from smokebox.limits import Limits

RUNSC = "SMOKEBOX_RUNSC"

# A process inside is up to two threads on the host, and without systrap (before 2023) many
# more the more there are: 160 were 4700. The kernel inside counts processes; this is for one
# that was taken over.
_HOST_PIDS_EACH, _HOST_PIDS = 2, 8192
_HINT = f"Install gVisor: apt-get install -y runsc (Debian, Ubuntu), or set {RUNSC} to its runsc."


class GvisorJail(ZygoteJail):
    """One jail with a kernel of its own, seen from the engine."""

    def rlimits(self, limits: Limits) -> dict[int, int]:
        """As in any jail, and how many processes: the cgroup of the host cannot count them."""
        found = super().rlimits(limits)
        if limits.pids is not None:
            found[resource.RLIMIT_NPROC] = limits.pids
        return found

    async def set_limits(self, limits: Limits) -> None:
        """Hold it to other limits; how many processes it has stays as it was entered."""
        await super().set_limits(bounds(limits))

    async def freeze(self) -> None:
        """Stop all of it, kernel included, where the host has cgroups."""
        self._check_freezer()
        await super().freeze()

    async def thaw(self) -> None:
        """Let it go on."""
        self._check_freezer()
        await super().thaw()

    def _check_freezer(self) -> None:
        if self.state.enforcement == "rlimits":
            raise Unsupported(
                "a gVisor sandbox can be paused only where the engine has cgroups.",
                hint="Run the engine as root, or by systemd-run --user --scope -p Delegate=yes.",
                operation="freeze",
            )


class GvisorJailer(ZygoteJailer):
    """Makes and finds gVisor jails on this host.

    `folder` is where it keeps a copy of the interpreter for the insides. Nothing is made and
    nothing started before the first jail.
    """

    kind = GvisorJail

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._copying = asyncio.Lock()

    @property
    def tier(self) -> Tier:
        """`gvisor`."""
        return "gvisor"

    def bounds(self, limits: Limits) -> Limits:
        """What the cgroup of a jail is held to, for those limits."""
        return bounds(limits)

    async def order(self, spec: JailSpec, stack: contextlib.ExitStack) -> TierRequest:
        """Have the porter be made, with the two programs that it needs."""
        runsc = find_runsc()
        interpreter, held = await self._interpreter()
        stack.callback(os.close, held)
        os.makedirs(f"{spec.directory}/run/io/{INTERPRETER}", exist_ok=True)
        return TierRequest(
            words={
                "tier": self.tier,
                "runsc": runsc,
                "interpreter": interpreter.path,
                "argv": interpreter.command(f"{IO}/{INTERPRETER}"),
            },
            fds=(held,),
        )

    async def furnish(self, setup: socket.socket) -> None:
        """Have gVisor started, and wait until the agent is there."""
        setup.send(b"boot")
        await hear(setup)

    def explain(self, error: OSError) -> SmokeboxError:
        """What the refusal to make a jail means, and what mends it."""
        text = error.strerror or str(error)
        if not text.endswith("(runsc)"):
            return namespaces.explain(error, self.tier)
        return IsolationUnavailable(
            f"gVisor does not start: {text.removesuffix(' (runsc)').rstrip('.')}.",
            hint=f"Set {RUNSC} to another version of runsc, 20221219 or later.",
            tier=self.tier,
        )

    async def _interpreter(self) -> tuple[GuestInterpreter, int]:
        """The copy, and a descriptor that keeps it there."""
        async with self._copying:
            try:
                interpreter = await asyncio.to_thread(provide, self._folder)
                return interpreter, interpreter.hold()
            except OSError as error:
                raise IsolationUnavailable(
                    f"a gVisor sandbox cannot be given an interpreter: {error}.",
                    hint="See that the state directory can be written to, and has 64 MB.",
                    tier=self.tier,
                ) from error


def bounds(limits: Limits) -> Limits:
    """What the cgroup of a gVisor jail is held to: the host runs more than the sandbox sees."""
    if limits.pids is None:
        return limits
    pids = min(limits.pids * _HOST_PIDS_EACH + _HOST_PIDS, MOST_PIDS)
    return dataclasses.replace(limits, pids=pids)


def find_runsc() -> str:
    """The runsc of this host; raises `IsolationUnavailable`."""
    named = os.environ.get(RUNSC)
    found = shutil.which(named or "runsc")
    if found is None:
        where = f"{RUNSC} names {named!r}, which" if named else "runsc, which is gVisor,"
        raise IsolationUnavailable(
            f"{where} is not a program on this host.", hint=_HINT, tier="gvisor"
        )
    return os.path.realpath(found)
