"""A jail whose first process our zygote cloned, seen from the engine, whatever the tier.

As root each jail has a range of ids of its own, and its layers are mapped to them. As an
ordinary user it has one id: root inside is that user outside.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import functools
import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from smokebox.engine.jail import guest_requests, uid_ranges
from smokebox.engine.jail.api import JailSpec, JailState, JailStats, Owner
from smokebox.engine.jail.cgroup import Cgroup, rlimits_for
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.namespace_setup import MESSAGE_SIZE
from smokebox.engine.jail.network import MAX_EGRESS_SOCKETS, EgressSockets
from smokebox.engine.jail.zygote_client import FirstProcess, ZygoteClient, unavailable
from smokebox.errors import SandboxGone, ServiceUnavailable, SmokeboxError
from smokebox.foundation.tasks import run_to_completion
from smokebox.runtime.pipes import readable
from smokebox.runtime.supervisor import receive_fds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.isolation import Tier
    from smokebox.limits import Limits

# Others may pass through, and see nothing: root inside is nobody out here, and the state
# directory above is closed to all but its owner.
_PASSABLE = 0o711
_BACKLOG = 1024
BUILD_SECONDS = 30.0
KILL_SECONDS = 10.0


def lay_out(directory: str, targets: int) -> None:
    """Make what is missing of a jail's directory."""
    for name, mode in (
        ("", _PASSABLE),
        ("data", 0o755),
        ("data/upper", 0o755),
        ("data/work", 0o755),
        ("root", 0o755),
        ("run", _PASSABLE),
        ("run/io", 0o755),
        *(
            (f"data/{kind}/{number}", 0o755)
            for kind in ("upper", "work")
            for number in range(targets)
        ),
    ):
        path = os.path.join(directory, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, mode)


def listen(box: int) -> socket.socket:
    """The socket that the agent listens on, in `run` of the directory behind `box`."""
    # A path of any length, by a short name: sockets take 107 bytes.
    path = f"/proc/self/fd/{box}/run/init.sock"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRequest:
    """What a tier tells the zygote of a jail, and the descriptors that it sends along."""

    words: dict[str, object] = field(default_factory=dict)
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltJail:
    """What a jail gives once it stands: its root, and the sockets that lead out of it."""

    root: int
    egress_sockets: EgressSockets

    def close(self) -> None:
        """Let go of both."""
        os.close(self.root)
        self.egress_sockets.close()


class ZygoteJail:
    """One jail, seen from the engine."""

    def __init__(
        self,
        state: JailState,
        *,
        run: int,
        pidfd: int,
        root: int,
        egress_sockets: EgressSockets,
        cgroup: Cgroup,
        setup: socket.socket | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._state = state
        self._limits = limits
        self._run = run
        self._pidfd = pidfd
        self._root = root
        self._doors = egress_sockets
        self._cgroup = cgroup
        self._setup = setup
        self._ended = asyncio.Event()
        self._closed = False
        self._killed = False
        self._frozen = False
        asyncio.get_running_loop().add_reader(pidfd, self._end)

    @property
    def state(self) -> JailState:
        """What `adopt` needs to find it again."""
        return self._state

    @property
    def owner(self) -> Owner:
        """Whose files these are, seen from outside."""
        gid = self._state.first_uid if self._state.uids > 1 else os.getegid()
        return Owner(uid=self._state.first_uid, gid=gid, count=self._state.uids)

    @property
    def root(self) -> int:
        """An O_PATH descriptor of the root directory."""
        return self._root

    @property
    def egress_sockets(self) -> EgressSockets:
        """The sockets that lead out of it, closed with it."""
        return self._doors

    @property
    def alive(self) -> bool:
        """Whether its first process runs, and shall."""
        return not (self._killed or self._ended.is_set())

    async def enter(self, hostname: str, limits: Limits) -> None:
        """Give the jail its name and limits, and lock its door behind it."""
        assert self._setup is not None, "a jail is entered once"
        words = {"hostname": hostname, "rlimits": self.rlimits(limits)}
        if limits != self._limits:
            await self.set_limits(limits)
        with self._setup as setup:
            self._setup = None
            try:
                setup.send(json.dumps(words).encode())
                _, fds = await hear(setup)
            except (ConnectionError, ProcessLookupError) as error:
                raise self._gone("was killed before it was entered") from error
        for fd in fds:
            os.close(fd)

    def rlimits(self, limits: Limits) -> dict[int, int]:
        """What each process of it is held to, for those limits."""
        return rlimits_for(limits, self._state.enforcement)

    async def connect(self) -> socket.socket:
        """A control socket to one supervisor."""
        control = socket.socket(socket.AF_UNIX)
        control.setblocking(False)
        until = time.monotonic() + guest_requests.ANSWER_SECONDS
        while True:
            try:
                control.connect(f"/proc/self/fd/{self._run}/init.sock")
                return control
            except BlockingIOError:
                # A burst has filled the queue of the listening socket.
                if time.monotonic() > until:
                    control.close()
                    raise self._gone("does not answer") from None
                await asyncio.sleep(0.002)
            except OSError:
                control.close()
                raise self._gone("is gone") from None

    async def wait(self) -> None:
        """Return when its first process has ended."""
        await self._ended.wait()

    async def freeze(self) -> None:
        """Stop every process in it."""
        self._frozen = True
        await asyncio.to_thread(self._cgroup.freeze)

    @property
    def frozen(self) -> bool:
        """Whether this engine has stopped it."""
        return self._frozen

    async def thaw(self) -> None:
        """Let them go on."""
        await asyncio.to_thread(self._cgroup.thaw)
        self._frozen = False

    async def stats(self) -> JailStats:
        """What it uses at this moment."""
        return await asyncio.to_thread(self._cgroup.stats)

    async def set_limits(self, limits: Limits) -> None:
        """Hold it to other limits from here on."""
        await asyncio.to_thread(self._cgroup.set_limits, limits)

    async def kill(self) -> None:
        """Kill everything in it, and wait until the kernel has let it go."""
        if self._closed:
            return
        # On a busy host its processes end long before it does, and not by themselves.
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._frozen:
            # What is frozen by cgroup v1 does not even die.
            await self.thaw()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            raise ServiceUnavailable(
                f"jail {self._state.key} does not end: the kernel holds a process of it.",
                hint="Try again; if it stays, something below (a disk, a mount) is stuck.",
                service="kernel",
            ) from None
        self.close()
        await asyncio.to_thread(self._cgroup.remove)

    def close(self) -> None:
        """Let go of descriptors and leave it running."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended.set()
        if self._setup is not None:
            self._setup.close()
        self._doors.close()
        for fd in (self._run, self._pidfd, self._root):
            os.close(fd)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended.set()

    def _gone(self, what: str) -> SandboxGone:
        return SandboxGone(
            f"jail {self._state.key} {what}.",
            hint="Run the command again: the sandbox starts afresh.",
            reason="jail ended" if not self.alive else "agent silent",
        )


class ZygoteJailer(abc.ABC):
    """Makes jails that start as a clone, and finds them again; a tier says how they differ."""

    kind: ClassVar[type[ZygoteJail]] = ZygoteJail

    def __init__(self) -> None:
        self._zygote = ZygoteClient()
        self._hierarchy = detect()
        self._privileged = uid_ranges.privileged()

    @property
    @abc.abstractmethod
    def tier(self) -> Tier:
        """Its name."""

    @abc.abstractmethod
    def explain(self, error: OSError) -> SmokeboxError:
        """What the refusal to make a jail means, and what mends it."""

    def bounds(self, limits: Limits) -> Limits:
        """What the cgroup of a jail is held to, for those limits."""
        return limits

    async def order(self, spec: JailSpec, stack: contextlib.ExitStack) -> TierRequest:
        """What the zygote is told besides; `stack` is closed when it has been."""
        return TierRequest()

    async def furnish(self, setup: socket.socket) -> None:
        """What is to be done once the jail stands and is counted."""

    async def make(
        self, spec: JailSpec, *, known: Callable[[JailState], Awaitable[object]] | None = None
    ) -> ZygoteJail:
        """A jail that waits for `enter`; until then it dies with this process.

        `known` is called as soon as it can be told from others, and awaited while it is built.
        """
        lay_out(spec.directory, len({layer.target for layer in spec.layers}))
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            order = await self.order(spec, always)
            cgroup = await self._count(spec)
            on_failure.callback(cgroup.remove)
            held = uid_ranges.take(privileged=self._privileged)
            always.callback(held.close)
            box = os.open(spec.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            always.callback(os.close, box)
            listener = always.enter_context(listen(box))
            setup, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            on_failure.callback(setup.close)
            always.enter_context(theirs)
            setup.setblocking(False)
            fds = [theirs.fileno(), listener.fileno(), *order.fds]
            if held.lock is not None:
                fds.append(held.lock.fileno())
            if (inside := cgroup.open()) is not None:
                always.callback(os.close, inside)
                fds.append(inside)
            words = {
                "key": spec.key,
                "directory": spec.directory,
                "layers": [[layer.path, layer.target] for layer in spec.layers],
                "first_uid": held.owner.uid,
                "uids": held.owner.count,
                "cgroup": inside is not None,
                **order.words,
            }
            try:
                born = await self._zygote.make(words, fds)
                on_failure.callback(kill_now, born)
                # The child has its own of all: with ours open, its end would not be heard.
                always.close()
                state = self._state(spec, born, held.owner)
                built = await self._build(setup, self._attach(born, cgroup), known and known(state))
                on_failure.callback(built.close)
                await self.furnish(setup)
            except OSError as error:
                if isinstance(error, SmokeboxError):
                    raise
                if isinstance(error, ConnectionError) or not self._zygote.running:
                    raise unavailable("was killed meanwhile") from error
                raise self.explain(error) from error
            run = os.open(f"{spec.directory}/run", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            jail = self.kind(
                state,
                run=run,
                pidfd=born.pidfd,
                root=built.root,
                egress_sockets=built.egress_sockets,
                cgroup=cgroup,
                setup=setup,
                limits=spec.limits,
            )
            on_failure.pop_all()
            return jail

    async def adopt(self, spec: JailSpec, state: JailState) -> ZygoteJail | None:
        """The running jail of another engine's time, or None when it is gone."""
        try:
            pidfd = os.pidfd_open(state.pid)
        except OSError:
            return None
        if start_time(state.pid) != state.started or state.extra.get("boot") != boot_id():
            os.close(pidfd)
            return None
        try:
            run = os.open(f"{spec.directory}/run", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            # Somebody removed its directory: nothing can reach it.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return None
        cgroup = self._hierarchy.adopt(state.key, state.pid)
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        egress_sockets = EgressSockets()
        jail = self.kind(
            state, run=run, pidfd=pidfd, root=root, egress_sockets=egress_sockets, cgroup=cgroup
        )
        try:
            found = await guest_requests.open_root(jail)
            os.dup2(found, root, inheritable=False)
            os.close(found)
            egress_sockets.take(await guest_requests.egress_sockets(jail))
        except SandboxGone:
            await jail.kill()
            return None
        return jail

    async def aclose(self) -> None:
        """Stop what makes jails. Entered jails run on."""
        self._zygote.close()

    def _state(self, spec: JailSpec, born: FirstProcess, owner: Owner) -> JailState:
        return JailState(
            tier=self.tier,
            key=spec.key,
            pid=born.pid,
            started=start_time(born.pid),
            first_uid=owner.uid,
            uids=owner.count,
            enforcement=self._hierarchy.enforcement,
            extra={"boot": boot_id()},
        )

    async def _count(self, spec: JailSpec) -> Cgroup:
        create, bounds = self._hierarchy.create, self.bounds(spec.limits)
        if self._hierarchy.enforcement == "rlimits":
            return create(spec.key, bounds)
        made: list[Cgroup] = []

        async def make() -> None:
            made.append(await asyncio.to_thread(create, spec.key, bounds))

        try:
            # A thread goes on, whoever waits for it.
            await run_to_completion(make())
        except asyncio.CancelledError:
            for cgroup in made:
                cgroup.remove()
            raise
        return made[0]

    async def _build(self, setup: socket.socket, *beside: Awaitable[object] | None) -> BuiltJail:
        """Wait until the child stands in its root, and what is done beside that is done."""
        others = asyncio.gather(*filter(None, beside))
        try:
            words, fds = await hear(setup)
        except BaseException:
            # What the child said of its end is worth more than that it was not there.
            await asyncio.gather(others, return_exceptions=True)
            raise
        try:
            await others
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        if not fds:
            raise OSError(errno.EPROTO, "the jail gave no root")
        sockets = [socket.socket(fileno=fd) for fd in fds[1:]]
        return BuiltJail(
            root=fds[0], egress_sockets=EgressSockets(sockets, reason=str(words.get("closed", "")))
        )

    async def _attach(self, born: FirstProcess, cgroup: Cgroup) -> None:
        if not cgroup.joined:
            await asyncio.to_thread(cgroup.attach, born.pid)


async def hear(setup: socket.socket) -> tuple[dict[str, object], list[int]]:
    """What the child says of its set-up; raises OSError with what stopped it."""
    if not await readable(setup.fileno(), BUILD_SECONDS):
        raise OSError(errno.ETIMEDOUT, "the jail took too long to build")
    message, fds = receive_fds(setup, MESSAGE_SIZE, 1 + MAX_EGRESS_SOCKETS)
    if not message:
        raise OSError(errno.ESRCH, "the jail ended while it was built")
    words = json.loads(message)
    if "error" in words:
        raise OSError(words["error"], f"{words['text']} ({words['stage']})")
    return words, fds


def kill_now(born: FirstProcess) -> None:
    """Kill a jail that was never finished."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(born.pidfd, signal.SIGKILL)
    os.close(born.pidfd)


@functools.cache
def boot_id() -> str:
    """Which start of the machine this is: pids and ticks begin again with each."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b") ")[2].split()[19])
    except OSError:
        return 0
