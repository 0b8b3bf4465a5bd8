"""The stronger tier: jails with a gVisor kernel, over the same files and network.

System calls of programs inside are served by `runsc`, a program on this host, which itself runs
in a jail of the default tier. All of it counts against the limits of the sandbox, and out of
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
from smokebox.engine.jail.jail import Jail, Jailer, TierRequest, receive_report
from smokebox.engine.jail.namespace_setup import IO
from smokebox.errors import IsolationUnavailable, Unsupported
from smokebox.limits import MAX_PIDS

if TYPE_CHECKING:
    import contextlib
    import socket

    from smokebox.engine.jail.spec import JailSpec
    from smokebox.errors import SmokeboxError
    from smokebox.isolation import Tier
    from smokebox.limits import Limits

RUNSC = "SMOKEBOX_RUNSC"

# A process inside is up to two threads on the host, and without systrap (before 2023) many more:
# 160 processes were 4700 threads. The kernel inside counts processes; the limit on the host is
# for a kernel that was taken over.
_HOST_PIDS_EACH, _HOST_PIDS = 2, 8192
_HINT = f"Install gVisor: apt-get install -y runsc (Debian, Ubuntu), or set {RUNSC} to its runsc."


class GvisorJail(Jail):
    """A jail with a gVisor kernel, as the engine sees it."""

    enters_alone = False

    def rlimits(self, limits: Limits) -> dict[int, int]:
        """Return the rlimits of each of its processes, with the limit of processes.

        The cgroup on the host cannot count the processes inside.
        """
        found = super().rlimits(limits)
        if limits.pids is not None:
            found[resource.RLIMIT_NPROC] = limits.pids
        return found

    async def set_limits(self, limits: Limits) -> None:
        """Change the limits of its cgroup; the limit of processes stays as it was entered."""
        await super().set_limits(cgroup_limits(limits))

    async def freeze(self) -> None:
        self._check_freezer()
        await super().freeze()

    async def thaw(self) -> None:
        self._check_freezer()
        await super().thaw()

    def _check_freezer(self) -> None:
        if self.state.enforcement == "rlimits":
            raise Unsupported(
                "a gVisor sandbox can be paused only where the engine has cgroups.",
                hint="Run the engine as root, or by systemd-run --user --scope -p Delegate=yes.",
                operation="freeze",
            )


class GvisorJailer(Jailer):
    """Creates and adopts gVisor jails.

    `folder` holds a copy of the interpreter for guest init. Nothing is copied or started before
    the first jail.
    """

    jail_class = GvisorJail

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._copy_lock = asyncio.Lock()

    @property
    def tier(self) -> Tier:
        return "gvisor"

    def cgroup_limits(self, limits: Limits) -> Limits:
        return cgroup_limits(limits)

    async def tier_request(self, spec: JailSpec, stack: contextlib.ExitStack) -> TierRequest:
        """Return the paths of runsc and of the interpreter."""
        runsc = find_runsc()
        interpreter, lock = await self._interpreter()
        stack.callback(os.close, lock)
        os.makedirs(f"{spec.directory}/run/io/{INTERPRETER}", exist_ok=True)
        return TierRequest(
            fields={
                "tier": self.tier,
                "runsc": runsc,
                "interpreter": interpreter.path,
                "argv": interpreter.command(f"{IO}/{INTERPRETER}"),
            },
            fds=(lock,),
        )

    async def boot(self, setup: socket.socket) -> None:
        """Start the gVisor kernel, and wait for guest init."""
        setup.send(b"boot")
        await receive_report(setup)

    def explain(self, error: OSError) -> SmokeboxError:
        text = error.strerror or str(error)
        if not text.endswith("(runsc)"):
            return namespaces.explain(error, self.tier)
        return IsolationUnavailable(
            f"gVisor does not start: {text.removesuffix(' (runsc)').rstrip('.')}.",
            hint=f"Set {RUNSC} to another version of runsc, 20221219 or later.",
            tier=self.tier,
        )

    async def _interpreter(self) -> tuple[GuestInterpreter, int]:
        """Return the copied interpreter, and a descriptor that keeps it from being removed."""
        async with self._copy_lock:
            try:
                interpreter = await asyncio.to_thread(provide, self._folder)
                return interpreter, interpreter.lock()
            except OSError as error:
                raise IsolationUnavailable(
                    f"cannot copy the interpreter for a gVisor sandbox: {error}.",
                    hint="Make sure that the state directory is writable and has 64 MB of space.",
                    tier=self.tier,
                ) from error


def cgroup_limits(limits: Limits) -> Limits:
    """Return the limits of the cgroup: the host runs more threads than the sandbox sees."""
    if limits.pids is None:
        return limits
    pids = min(limits.pids * _HOST_PIDS_EACH + _HOST_PIDS, MAX_PIDS)
    return dataclasses.replace(limits, pids=pids)


def find_runsc() -> str:
    """Return the path of runsc. Raises `IsolationUnavailable`."""
    named = os.environ.get(RUNSC)
    found = shutil.which(named or "runsc")
    if found is None:
        what = f"{RUNSC} names {named!r}, which" if named else "runsc, the program of gVisor,"
        raise IsolationUnavailable(
            f"{what} is not a program on this host.", hint=_HINT, tier="gvisor"
        )
    return os.path.realpath(found)
