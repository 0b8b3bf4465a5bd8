"""Jails as the engine sees them, and the base of the isolation tiers that create them.

A tier is a `Jailer`, which creates a `Jail` from a `JailSpec` and finds it again by its
`JailState`. The first process of a jail is a clone of the zygote. As root, each jail has a range
of ids, and its layers are mapped to them. As an ordinary user it has one id: root inside is that
user outside.
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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from smokebox.engine.jail import guest_requests, kernfs, uid_ranges
from smokebox.engine.jail.cgroup import Cgroup, rlimits_for
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.engine_lease import ORPHAN_TIMEOUT
from smokebox.engine.jail.namespace_setup import MESSAGE_SIZE
from smokebox.engine.jail.network import MAX_EGRESS_SOCKETS, EgressSockets
from smokebox.engine.jail.socket_memory import SocketMemory
from smokebox.engine.jail.spec import JailSpec, JailState, JailStats, Owner
from smokebox.engine.jail.zygote_client import FirstProcess, ZygoteClient, unavailable
from smokebox.errors import SandboxGone, ServiceUnavailable, SmokeboxError
from smokebox.foundation.tasks import run_to_completion
from smokebox.runtime.pipes import readable
from smokebox.runtime.supervisor import receive_fds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.isolation import Tier
    from smokebox.limits import Limits

# Others may pass through but list nothing: root inside is an unprivileged user on the host, and
# the state directory above is closed to all but its owner.
PASSABLE = 0o711
# The engine's pipes, and output that is too large for memory, which programs inside may read.
PIPES, OUTPUT = "run/io", "run/io/output"
_BACKLOG = 1024
BUILD_SECONDS = 30.0
KILL_SECONDS = 10.0
# A jail that has not ended by then may lack the CPU that its processes need to exit.
_UNLIMIT_SECONDS = 0.5
# Others wait meanwhile for their memory to be checked.
_DIAGNOSTICS_SECONDS = 1.0


class Jail:
    """One isolated Linux. Treat everything that comes out of it as hostile.

    `engine` is the connection to its guest init: it carries the set-up of a new jail, and then
    keeps the jail from ending as an orphan. `limits` are those that a new jail was created with.
    """

    enters_alone: ClassVar[bool] = True
    """True if one process is the whole jail until `enter`."""

    def __init__(
        self,
        state: JailState,
        *,
        run: int,
        pidfd: int,
        root: int,
        egress_sockets: EgressSockets,
        cgroup: Cgroup,
        engine: socket.socket | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.state = state
        self.egress_sockets = egress_sockets
        self.root = root
        """An O_PATH descriptor of the root directory; open below it with openat2 only."""
        self.frozen = False
        """True while this engine has stopped it, so that it does not respond."""
        self._limits = limits
        self._run = run
        self._pidfd = pidfd
        self._cgroup = cgroup
        self._engine = engine
        self._socket_memory: SocketMemory | None = None
        self._diagnostics_requested = False
        self._ended = asyncio.Event()
        self._closed = False
        self._killed = False
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    @property
    def owner(self) -> Owner:
        """Ids of its files on the host."""
        gid = self.state.first_uid if self.state.uids > 1 else os.getegid()
        return Owner(uid=self.state.first_uid, gid=gid, count=self.state.uids)

    @property
    def alive(self) -> bool:
        """True while its first process runs, until `kill` is called."""
        return not (self._killed or self._ended.is_set())

    def pids(self) -> list[int]:
        """Return its processes, by their pids on the host."""
        return self._cgroup.pids()

    async def enter(
        self, hostname: str, limits: Limits, *, orphan_timeout: float | None = None
    ) -> None:
        """Set the name and limits of a new jail, and drop the privileges of its set-up.

        Once this returns, the jail outlives this process, for `orphan_timeout` seconds at most.
        """
        engine = self._engine
        assert engine is not None
        if limits != self._limits:
            await self.set_limits(limits)
        message = {
            "hostname": hostname,
            "rlimits": self.rlimits(limits),
            "orphan_timeout": orphan_timeout or 0.0,
        }
        try:
            with contextlib.ExitStack() as sent:
                tasks = self._cgroup.open_tasks()
                for fd in tasks:
                    sent.callback(os.close, fd)
                socket.send_fds(engine, [json.dumps(message).encode()], tasks)
            _, fds = await receive_report(engine)
        except (ConnectionError, ProcessLookupError) as error:
            raise self._gone("was killed before it was entered") from error
        for fd in fds:
            os.close(fd)
        if tasks:
            await asyncio.to_thread(self._cgroup.finish_join)

    def set_orphan_timeout(self, seconds: float | None) -> None:
        """Set how long it keeps running when no engine is attached; None is for ever."""
        if self._engine is not None:
            with contextlib.suppress(OSError):
                self._engine.send(ORPHAN_TIMEOUT.pack(seconds or 0.0))

    def rlimits(self, limits: Limits) -> dict[int, int]:
        """Return the rlimits of each of its processes."""
        return rlimits_for(limits, self.state.enforcement)

    async def connect(self) -> socket.socket:
        """Return a non-blocking connection to a supervisor (see `guest_init`)."""
        control = socket.socket(socket.AF_UNIX)
        control.setblocking(False)
        until = time.monotonic() + guest_requests.RESPONSE_SECONDS
        while True:
            try:
                control.connect(f"/proc/self/fd/{self._run}/init.sock")
                return control
            except BlockingIOError:
                # A burst of connections has filled the backlog.
                if time.monotonic() > until:
                    control.close()
                    raise self._gone("does not respond") from None
                await asyncio.sleep(0.002)
            except OSError:
                control.close()
                raise self._gone("is gone") from None

    async def wait(self) -> None:
        """Wait until its first process has exited."""
        await self._ended.wait()

    async def freeze(self) -> None:
        """Stop all its processes."""
        self.frozen = True
        await asyncio.to_thread(self._cgroup.freeze)

    async def thaw(self) -> None:
        """Continue all its processes."""
        await asyncio.to_thread(self._cgroup.thaw)
        self.frozen = False

    async def stats(self) -> JailStats:
        """Return its current usage."""
        stats = await asyncio.to_thread(self._cgroup.stats)
        if self.state.enforcement != "rlimits" or stats.memory is None:
            return stats
        return replace(stats, memory=stats.memory + await self._measure_sockets())

    async def _measure_sockets(self) -> int:
        """Return the bytes that its sockets hold; 0 if guest init gives no diagnostics socket."""
        if not self._diagnostics_requested and not self.frozen:
            self._diagnostics_requested = True
            with contextlib.suppress(SandboxGone, TimeoutError):
                async with asyncio.timeout(_DIAGNOSTICS_SECONDS):
                    sock = await guest_requests.open_diagnostics(self)
                self._socket_memory = SocketMemory(sock)
        if self._socket_memory is None or self._closed:
            return 0
        return await asyncio.to_thread(self._socket_memory.measure)

    async def set_limits(self, limits: Limits) -> None:
        """Change the limits of its cgroup."""
        await asyncio.to_thread(self._cgroup.set_limits, limits)

    async def join(self, group: str) -> None:
        """Move a jail that is not entered yet into a group (see `JailSpec`)."""
        await asyncio.to_thread(self._cgroup.join, group, by_itself=self.enters_alone)
        self.state = replace(self.state, group=group)
        # Its limits stayed behind: `enter` sets them.
        self._limits = None

    async def kill(self) -> None:
        """Kill all its processes, wait for them, and remove its cgroup. Safe to repeat."""
        if self._closed:
            return
        # On a busy host its processes exit long before the pidfd reports it.
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self.frozen:
            # A process frozen by cgroup v1 does not even die.
            await self.thaw()
        if not await self._ends_within(_UNLIMIT_SECONDS):
            await asyncio.to_thread(self._cgroup.lift_cpu_limit)
        if not await self._ends_within(KILL_SECONDS):
            raise ServiceUnavailable(
                f"jail {self.state.key} does not end: a process of it is stuck in the kernel.",
                hint="Try again; if it stays, a disk or a mount of the host hangs.",
                service="kernel",
            )
        fds = self._detach()
        # The last descriptor of the root unmounts it, which takes long.
        await asyncio.to_thread(self._remove, fds)

    def _remove(self, fds: tuple[int, ...]) -> None:
        _close_all(fds)
        self._cgroup.remove()

    def close(self) -> None:
        """Close its descriptors and leave it running, for another engine to adopt."""
        _close_all(self._detach())

    def _detach(self) -> tuple[int, ...]:
        """Let go of the jail, and return the descriptors to close."""
        if self._closed:
            return ()
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended.set()
        if self._engine is not None:
            self._engine.close()
        self.egress_sockets.close()
        if self._socket_memory is not None:
            self._socket_memory.close()
        return (self._run, self._pidfd, self.root)

    async def attach(self) -> None:
        """Open the root and the egress sockets of an adopted jail, and become its engine."""
        root = await guest_requests.open_root(self)
        os.dup2(root, self.root, inheritable=False)
        os.close(root)
        self.egress_sockets.replace(await guest_requests.egress_sockets(self))
        self._engine = await guest_requests.attach(self)

    async def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self._ended.is_set()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended.set()

    def _gone(self, what: str) -> SandboxGone:
        return SandboxGone(
            f"jail {self.state.key} {what}.",
            hint="Run the command again: the sandbox restarts.",
            reason="guest init does not respond" if self.alive else "jail ended",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRequest:
    """Fields that a tier adds to the request to the zygote, and descriptors to send with it."""

    fields: dict[str, object] = field(default_factory=dict)
    fds: tuple[int, ...] = ()


class Jailer(abc.ABC):
    """An isolation tier: creates jails on this host and adopts running ones."""

    jail_class: ClassVar[type[Jail]] = Jail

    def __init__(self) -> None:
        self._zygote = ZygoteClient()
        self._hierarchy = detect()
        self._privileged = uid_ranges.privileged()

    @property
    @abc.abstractmethod
    def tier(self) -> Tier:
        """Name of the tier."""

    @property
    def has_users(self) -> bool:
        """True if programs in its jails can run as other users than root."""
        return self._privileged

    @abc.abstractmethod
    def explain(self, error: OSError) -> SmokeboxError:
        """Return the error, with a hint, for a jail that could not be created."""

    def cgroup_limits(self, limits: Limits) -> Limits:
        """Return the limits of the cgroup of a jail with these limits."""
        return limits

    async def tier_request(self, spec: JailSpec, stack: contextlib.ExitStack) -> TierRequest:
        """Return additions to the request; `stack` is closed after it was sent."""
        return TierRequest()

    async def boot(self, setup: socket.socket) -> None:
        """Finish a jail whose root is mounted and which is in its cgroup."""

    async def make(
        self, spec: JailSpec, *, on_fork: Callable[[JailState], Awaitable[object]] | None = None
    ) -> Jail:
        """Create a jail that waits for `enter`; until then it ends with this process.

        `on_fork` is called once its first process exists, and awaited during its set-up.
        """
        make_directories(spec.directory, len({layer.target for layer in spec.layers}))
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            additions = await self.tier_request(spec, always)
            cgroup = await self._create_cgroup(spec)
            on_failure.callback(cgroup.remove)
            ids = uid_ranges.allocate(privileged=self._privileged)
            always.callback(ids.close)
            listener = always.enter_context(listen(spec.directory))
            setup, child_setup = socket.socketpair(type=socket.SOCK_SEQPACKET)
            on_failure.callback(setup.close)
            always.enter_context(child_setup)
            setup.setblocking(False)
            fds = [child_setup.fileno(), listener.fileno(), *additions.fds]
            if ids.lock is not None:
                fds.append(ids.lock.fileno())
            if (cgroup_fd := cgroup.open()) is not None:
                always.callback(os.close, cgroup_fd)
                fds.append(cgroup_fd)
            request = {
                "key": spec.key,
                "directory": spec.directory,
                "layers": [[layer.path, layer.target, layer.owner] for layer in spec.layers],
                "first_uid": ids.owner.uid,
                "uids": ids.owner.count,
                "cgroup": cgroup_fd is not None,
                **additions.fields,
            }
            try:
                process = await self._zygote.fork(request, fds)
                on_failure.callback(kill_now, process)
                # The child has its own: while ours are open, its exit would go unnoticed.
                always.close()
                state = self._state(spec, process, ids.owner)
                others = asyncio.gather(
                    _attach(process, cgroup), *([on_fork(state)] if on_fork else [])
                )
                root, egress_sockets = await self._wait_for_root(setup, others)
                on_failure.callback(os.close, root)
                on_failure.callback(egress_sockets.close)
                await self.boot(setup)
            except OSError as error:
                if isinstance(error, SmokeboxError):
                    raise
                if isinstance(error, ConnectionError) or not self._zygote.running:
                    raise unavailable("was killed meanwhile") from error
                raise self.explain(error) from error
            run = os.open(f"{spec.directory}/run", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            jail = self.jail_class(
                state,
                run=run,
                pidfd=process.pidfd,
                root=root,
                egress_sockets=egress_sockets,
                cgroup=cgroup,
                engine=setup,
                limits=spec.limits,
            )
            on_failure.pop_all()
            return jail

    async def adopt(self, spec: JailSpec, state: JailState) -> Jail | None:
        """Return a running jail that another engine created, or None if it is gone."""
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
            # Its directory was removed: it cannot be reached.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return None
        jail = self.jail_class(
            state,
            run=run,
            pidfd=pidfd,
            root=os.open("/", os.O_PATH | os.O_CLOEXEC),
            egress_sockets=EgressSockets(),
            cgroup=self._hierarchy.adopt(state.key, state.pid, state.group),
        )
        try:
            await jail.attach()
        except SandboxGone:
            await jail.kill()
            return None
        return jail

    async def aclose(self) -> None:
        """Stop the zygote. Entered jails keep running."""
        self._zygote.close()

    def _state(self, spec: JailSpec, process: FirstProcess, owner: Owner) -> JailState:
        return JailState(
            tier=self.tier,
            key=spec.key,
            pid=process.pid,
            started=start_time(process.pid),
            first_uid=owner.uid,
            uids=owner.count,
            enforcement=self._hierarchy.enforcement,
            group=spec.group,
            extra={"boot": boot_id()},
        )

    async def _create_cgroup(self, spec: JailSpec) -> Cgroup:
        create, limits = self._hierarchy.create, self.cgroup_limits(spec.limits)
        if self._hierarchy.enforcement == "rlimits":
            return create(spec.key, limits, spec.group)
        created: list[Cgroup] = []

        async def run() -> None:
            created.append(await asyncio.to_thread(create, spec.key, limits, spec.group))

        try:
            # A cancelled call does not stop its thread.
            await run_to_completion(run())
        except asyncio.CancelledError:
            for cgroup in created:
                cgroup.remove()
            raise
        return created[0]

    async def _wait_for_root(
        self, setup: socket.socket, others: asyncio.Future[list[object]]
    ) -> tuple[int, EgressSockets]:
        """Wait until the child has mounted its root, and for `others`."""
        try:
            report, fds = await receive_report(setup)
        except BaseException:
            # The child's own error is worth more than that it was not there.
            await asyncio.gather(others, return_exceptions=True)
            raise
        try:
            await others
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        if not fds:
            raise OSError(errno.EPROTO, "the jail sent no root")
        sockets = [socket.socket(fileno=fd) for fd in fds[1:]]
        return fds[0], EgressSockets(sockets, reason=str(report.get("no_egress", "")))


async def _attach(process: FirstProcess, cgroup: Cgroup) -> None:
    if not cgroup.joined:
        await asyncio.to_thread(cgroup.attach, process.pid)


def make_directories(directory: str, targets: int) -> None:
    """Create missing directories of a jail."""
    for name, mode in (
        ("", PASSABLE),
        ("data", 0o755),
        ("data/upper", 0o755),
        ("data/work", 0o755),
        ("root", 0o755),
        ("run", PASSABLE),
        (PIPES, 0o755),
        (OUTPUT, 0o755),
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


def listen(directory: str) -> socket.socket:
    """Return the listening socket for guest init, in the directory of a jail."""
    parent = os.open(f"{directory}/run", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    # By a short name: paths of sockets are limited to 107 bytes.
    path = f"/proc/self/fd/{parent}/init.sock"
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(parent)
    return listener


async def receive_report(setup: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Receive a report of the child on its set-up. Raises OSError with the reason it failed."""
    if not await readable(setup.fileno(), BUILD_SECONDS):
        raise OSError(errno.ETIMEDOUT, "the set-up of the jail timed out")
    message, fds = receive_fds(setup, MESSAGE_SIZE, 1 + MAX_EGRESS_SOCKETS)
    if not message:
        raise OSError(errno.ESRCH, "the jail ended during its set-up")
    report = json.loads(message)
    if "error" in report:
        raise OSError(report["error"], f"{report['text']} ({report['stage']})")
    return report, fds


def kill_now(process: FirstProcess) -> None:
    """Kill a jail during its set-up."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
    os.close(process.pidfd)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


@functools.cache
def boot_id() -> str:
    """Return the id of the current boot: pids and start times are unique within one."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it is gone."""
    fields = kernfs.stat_fields(pid)
    return int(fields[19]) if fields else 0
