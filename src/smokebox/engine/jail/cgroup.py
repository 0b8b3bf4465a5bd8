"""The cgroup of one jail: its limits, its processes and the kernel's accounting of them.

Hosts without cgroups get per-process rlimits and sums over /proc instead (`ProcessTree`). Every
call blocks briefly, and `attach` for as long as the kernel synchronises its readers (6 to 15 ms
after a quiet period): use a thread on an event loop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from typing import TYPE_CHECKING

from smokebox.engine.jail import kernfs
from smokebox.engine.jail.kernfs import field, number, read, write, write_if_exists
from smokebox.engine.jail.spec import JailStats
from smokebox.errors import Conflict, DeadlineExceeded, InvalidOption, LimitReached, SandboxGone
from smokebox.runtime.supervisor import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.jail.cgroup_hierarchy import CgroupPlacement
    from smokebox.engine.jail.spec import Enforcement
    from smokebox.limits import Limits

# Processes stop when they get the CPU, which takes long on a busy one.
FREEZE_SECONDS = 10.0
KILL_SECONDS = 5.0
REMOVE_SECONDS = 2.0
JOIN_SECONDS = 5.0

# Start of the name of a cgroup that holds the jails of one group, and of no key.
GROUP = "group-"

# Limit of the buffers of network sockets in version 1: a share of the limit of memory.
BUFFERS = "memory.kmem.tcp.limit_in_bytes"
_BUFFERS_SHARE = 8
_LEAST_BUFFERS = 4 << 20

_PERIOD_US = 100_000
_ATTACH_ROUNDS = 8
# An empty group may be removed between its creation and that of a cgroup in it.
_MAKE_ROUNDS = 20
_SIGNAL_BATCH = 64


class Cgroup:
    """The cgroup of one jail, created by `Hierarchy.create`.

    Jails of a group share the CPU weight of one jail: in the hierarchy of that controller, their
    cgroups lie in one of the group. All weights are those that the kernel gives a new cgroup.
    """

    def __init__(self, key: str, placement: CgroupPlacement, group: str = "") -> None:
        if not key or "/" in key or key.startswith((".", GROUP)):
            raise InvalidOption(
                f"invalid name of a cgroup: {key!r}",
                hint="Use letters, digits and dashes.",
                option="key",
                value=key,
            )
        self.key = key
        self.placement = placement
        self._last_oom_kills: int | None = None
        self._moves: list[tuple[str, str]] = []
        self._locate(group)

    @property
    def joined(self) -> bool:
        """True if a process cloned into `open()` needs no `attach`."""
        return self.placement.enforcement == "cgroup-v2"

    def open(self) -> int | None:
        """Open a descriptor for CLONE_INTO_CGROUP; None without cgroup2."""
        if self._core is None:
            return None
        with self._existing():
            return os.open(self._core, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def attach(self, pid: int) -> None:
        """Add a process, and its children forked meanwhile.

        Children forked before are found only if it was cloned into `open()`; otherwise attach
        the first process of a jail before it forks.
        """
        done: set[int] = set()
        for _ in range(_ATTACH_ROUNDS):
            fresh = {pid, *self.pids()} - done
            if not fresh:
                return
            for member in fresh:
                with self._existing():
                    self._attach(member, required=member == pid)
            done |= fresh

    def _attach(self, pid: int, *, required: bool) -> None:
        # The directory that `pids` reads comes first, so that a fork in between is seen.
        for directory in self._directories:
            if directory == self._core and pid in self.pids():
                continue
            try:
                write(f"{directory}/cgroup.procs", str(pid))
            except ProcessLookupError as error:
                if required:
                    raise SandboxGone(
                        f"process {pid} exited before its limits could be set",
                        reason="exited",
                    ) from error
                return

    def set_limits(self, limits: Limits) -> None:
        """Set the limits."""
        with self._existing():
            self._set_limits(limits)

    def _set_limits(self, limits: Limits) -> None:
        self._limit_memory(limits.memory)
        if "pids" in self._paths:
            write(f"{self._paths['pids']}/pids.max", _or_max(limits.pids))
        if "cpu" in self._paths:
            self._limit_cpu(limits.cpu)

    def lift_cpu_limit(self) -> None:
        """Let its processes have all the CPU that is left, to exit. Its weight stays."""
        if "cpu" in self._paths:
            with contextlib.suppress(SandboxGone), self._existing():
                self._limit_cpu(None)

    def stats(self) -> JailStats:
        """Return the usage; memory excludes page cache that the kernel can reclaim."""
        memory = self._paths.get("memory", "")
        used = number(f"{memory}/{self._by_version('memory.current', 'memory.usage_in_bytes')}")
        # Version 2 has no such file, and counts them in.
        buffers = number(f"{memory}/memory.kmem.tcp.usage_in_bytes") or 0
        inactive = self._by_version("inactive_file", "total_inactive_file")
        cache = field(f"{memory}/memory.stat", inactive) or 0
        peak = self._by_version("memory.peak", "memory.max_usage_in_bytes")
        return JailStats(
            cpu_seconds=self._cpu_seconds(),
            memory=None if used is None else max(0, used - cache) + buffers,
            memory_peak=number(f"{memory}/{peak}"),
            pids=number(f"{self._paths.get('pids', '')}/pids.current"),
            oom_kills=self.oom_kills(),
        )

    def oom_kills(self) -> int | None:
        """Return how many of its processes were killed out of memory; known after `remove`."""
        file = self._by_version("memory.events", "memory.oom_control")
        count = field(f"{self._paths.get('memory', '')}/{file}", "oom_kill")
        if count is not None:
            self._last_oom_kills = count
        return self._last_oom_kills

    def pids(self) -> list[int]:
        """Return its processes, by their pids in our namespace."""
        return _pids(self._directories[0])

    def abandoned(self, seconds: float) -> bool:
        """Return True if it has no process and is older than `seconds`."""
        created = []
        for path in self._directories:
            # Its own engine may remove it at this moment.
            with contextlib.suppress(FileNotFoundError):
                created.append(os.stat(path).st_ctime)
        return not self.pids() and time.time() - max(created, default=0.0) >= seconds

    def freeze(self, timeout: float = FREEZE_SECONDS) -> None:
        """Stop every process and wait for it; continue all if that takes too long."""
        with self._existing():
            self._set_frozen(True)
        for _ in _retries(timeout):
            if self._is_frozen():
                return
        self.thaw()
        raise DeadlineExceeded(
            f"the processes of {self.key} did not stop within {timeout} s",
            hint="One of them waits for a device or a remote file system; kill it instead.",
            operation="freeze",
            timeout=timeout,
        )

    def thaw(self) -> None:
        """Continue every process."""
        with self._existing():
            self._set_frozen(False)

    def kill(self, timeout: float = KILL_SECONDS) -> None:
        """Kill every process, frozen or not, and wait for it. Safe to repeat."""
        self.lift_cpu_limit()
        for _ in _retries(timeout):
            self._kill_once()
            if not self.pids():
                return
        raise DeadlineExceeded(
            f"processes {self.pids()[:5]} of {self.key} survived SIGKILL for {timeout} s",
            hint="They are stuck in the kernel, most often on a file system that hangs.",
            operation="kill",
            timeout=timeout,
        )

    def remove(self, timeout: float = REMOVE_SECONDS) -> None:
        """Remove it once its processes are gone, and its group with the last. Safe to repeat."""
        self.oom_kills()
        # Also where it was before an interrupted `join`.
        outside = [f"{parent}/{self.key}" for parent in self.placement.directories]
        left = list(dict.fromkeys([*self._directories, *outside]))
        for _ in _retries(timeout):
            left = [path for path in left if not _remove(path)]
            if not left:
                self.placement.remove_group(self.group)
                return
        raise DeadlineExceeded(
            f"cgroup {left[0]} is still in use, by {self.pids()[:5] or 'an unknown process'}",
            hint="Kill its processes first.",
            operation="remove",
            timeout=timeout,
        )

    def make(self, limits: Limits) -> None:
        """Create its directories and set the limits."""
        self._make_directories(self._directories, limits)

    def join(self, group: str, *, by_itself: bool = False) -> None:
        """Move it into a group, without its limits.

        For a jail that runs no program of its tenant yet: it has no limits until they are set, and
        version 2 does not count what its memory was before. With `by_itself`, its only process
        moves itself through `open_tasks` where the kernel has that, and `finish_join` follows:
        moving another one takes as long as `attach`.
        """
        before = self._directories
        self._locate(group)
        pairs = zip(before, self._directories, strict=True)
        self._moves = [(old, new) for old, new in pairs if old != new]
        self._make_directories([new for _, new in self._moves])
        if not by_itself or self.placement.enforcement == "cgroup-v2":
            self.finish_join()

    def open_tasks(self) -> list[int]:
        """Open the files to which a thread writes "0" to follow a `join`."""
        with self._existing():
            return [os.open(f"{new}/tasks", os.O_WRONLY | os.O_CLOEXEC) for _, new in self._moves]

    def finish_join(self) -> None:
        """Move the processes that did not move themselves, and remove what they left."""
        for old, new in self._moves:
            self._move(old, new)
        self._moves = []

    def _locate(self, group: str) -> None:
        """Set its directories, from the core first."""
        self.group = group
        placement = self.placement
        inside = {
            one: f"{placement.inside(one, group)}/{self.key}" for one in placement.directories
        }
        self._core = inside[placement.core] if placement.core else None
        self._paths = {name: inside[parent] for name, parent in placement.parents.items()}
        self._directories = list(inside.values())

    def _move(self, old: str, new: str) -> None:
        for _ in _retries(JOIN_SECONDS):
            # Children forked meanwhile are in the same directory as their parent.
            if not (pids := _pids(old)) and _remove(old):
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    write(f"{new}/cgroup.procs", str(pid))
        raise DeadlineExceeded(
            f"processes {_pids(old)[:5]} of {self.key} did not move into its group",
            hint="Create the sandbox again.",
            operation="join",
            timeout=JOIN_SECONDS,
        )

    def _make_directories(self, directories: list[str], limits: Limits | None = None) -> None:
        for left in reversed(range(_MAKE_ROUNDS)):
            try:
                self.placement.make_group(self.group)
                self._make_each(directories)
                if limits is not None:
                    self._set_limits(limits)
                return
            except OSError as error:
                # ENODEV: the parent was removed while it was open.
                if not left or error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
            self.placement.prepare()

    def _make_each(self, directories: list[str]) -> None:
        for directory in directories:
            # One of an earlier run would still count its OOM kills.
            if not _remove(directory):
                raise Conflict(
                    f"the cgroup {directory} is in use",
                    hint="Kill its processes first.",
                    kind="cgroup",
                    name=self.key,
                )
            os.mkdir(directory, 0o755)

    def _by_version(self, v2: str, v1: str) -> str:
        return v2 if self.placement.enforcement == "cgroup-v2" else v1

    def _limit_memory(self, limit: int | None) -> None:
        if "memory" not in self._paths:
            return
        memory = self._paths["memory"]
        if self.placement.enforcement == "cgroup-v2":
            write(f"{memory}/memory.max", _or_max(limit))
            write_if_exists(f"{memory}/memory.swap.max", _or_max(None if limit is None else 0))
            return
        ram, swap = f"{memory}/memory.limit_in_bytes", f"{memory}/memory.memsw.limit_in_bytes"
        text = str(-1 if limit is None else limit)
        # The buffers of TCP and UDP are not in the limit of memory, and have one of their own.
        buffers = -1 if limit is None else buffers_limit(limit)
        try:
            write_if_exists(f"{memory}/{BUFFERS}", str(buffers))
            # The limit with swap can never be below the one without, not even between two writes.
            current = number(ram)
            if limit is not None and current is not None and limit < current:
                write(ram, text)
                write_if_exists(swap, text)
            else:
                write_if_exists(swap, text)
                write(ram, text)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise LimitReached(
                f"{self.key} uses more memory than {limit} bytes",
                hint="Stop some of its processes first, or pass a higher limit.",
                limit="memory",
            ) from error

    def _limit_cpu(self, cpu: float | None) -> None:
        limit_cpu(self._paths["cpu"], cpu, self.placement.enforcement)

    def _cpu_seconds(self) -> float | None:
        if self._core:
            used = field(f"{self._core}/cpu.stat", "usage_usec")
            return None if used is None else used / 1e6
        used = number(f"{self._paths.get('cpuacct', '')}/cpuacct.usage")
        return None if used is None else used / 1e9

    def _set_frozen(self, frozen: bool) -> None:
        if self._core:
            write(f"{self._core}/cgroup.freeze", str(int(frozen)))
        else:
            state = "FROZEN" if frozen else "THAWED"
            write(f"{self._paths['freezer']}/freezer.state", state)

    def _is_frozen(self) -> bool:
        if self._core:
            return field(f"{self._core}/cgroup.events", "frozen") == 1
        return read(f"{self._paths['freezer']}/freezer.state").strip() == "FROZEN"

    def _kill_once(self) -> None:
        if self._core and write_if_exists(f"{self._core}/cgroup.kill", "1"):
            return
        with contextlib.suppress(SandboxGone, DeadlineExceeded):
            self.freeze()
        # A frozen process cannot fork, or exit and leave its pid to another.
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(SandboxGone):
            self.thaw()

    @contextlib.contextmanager
    def _existing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # ENODEV: removed while a file of it was open.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            raise SandboxGone(
                f"the cgroup of {self.key} is gone, and its processes with it",
                hint="Restart the sandbox.",
                reason="removed",
            ) from error


def limit_cpu(directory: str, cpu: float | None, enforcement: Enforcement) -> None:
    """Limit the cores of the processes in a cgroup; None is no limit."""
    quota = None if cpu is None else round(cpu * _PERIOD_US)
    if enforcement == "cgroup-v2":
        write(f"{directory}/cpu.max", f"{_or_max(quota)} {_PERIOD_US}")
        return
    write(f"{directory}/cpu.cfs_period_us", str(_PERIOD_US))
    write(f"{directory}/cpu.cfs_quota_us", str(-1 if quota is None else quota))


def buffers_limit(memory: int) -> int:
    """Return the limit of network buffers, in version 1, beside a limit of memory."""
    return max(memory // _BUFFERS_SHARE, _LEAST_BUFFERS)


def _pids(directory: str) -> list[int]:
    lines = read(f"{directory}/cgroup.procs").split()
    # Zero is a process outside of our pid namespace.
    return [int(line) for line in lines if line != "0"]


def _retries(timeout: float) -> Iterator[None]:
    """Yield at once and then at growing intervals, until the time is up."""
    end, pause = time.monotonic() + timeout, 0.0002
    yield
    while time.monotonic() < end:
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
        yield


def _remove(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for name in [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]:
                _remove(name)
        return False
    return True


def _or_max(value: int | None) -> str:
    return "max" if value is None else str(value)


class ProcessTree(Cgroup):
    """Replacement on a host without cgroups: the attached process and its descendants.

    Rlimits limit each process (`rlimits_for`), nothing limits their sum, and OOM kills are not
    counted.
    """

    _first: int | None = None

    def attach(self, pid: int) -> None:
        """Set the first process of the jail."""
        self._first = pid

    def pids(self) -> list[int]:
        if self._first is None:
            return []
        alive = [self._first] if kernfs.state(self._first) not in "ZX" else []
        return [*alive, *descendants(self._first)]

    def stats(self) -> JailStats:
        """Return sums over its processes."""
        pids = self.pids()
        return JailStats(
            cpu_seconds=sum(kernfs.cpu_seconds(pid) for pid in pids),
            memory=sum(kernfs.resident(pid) for pid in pids),
            pids=sum(kernfs.threads(pid) for pid in pids),
        )

    def _set_frozen(self, frozen: bool) -> None:
        number = signal.SIGSTOP if frozen else signal.SIGCONT
        pids = self.pids()
        for start in range(0, len(pids), _SIGNAL_BATCH):
            self._signal(pids[start : start + _SIGNAL_BATCH], number)

    def _is_frozen(self) -> bool:
        running = [pid for pid in self.pids() if kernfs.state(pid) not in "TtZX"]
        self._signal(running[:_SIGNAL_BATCH], signal.SIGSTOP)
        return not running

    def _kill_once(self) -> None:
        pids = self.pids()
        for start in range(0, len(pids), _SIGNAL_BATCH):
            self._signal(pids[start : start + _SIGNAL_BATCH], signal.SIGKILL)

    def _signal(self, pids: list[int], number: int) -> None:
        """Signal processes that are still in the jail after their pidfds were opened."""
        pidfds: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfds[pid] = os.pidfd_open(pid)
        current = set(self.pids()) if pidfds else set()
        for pid, fd in pidfds.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid in current:
                    signal.pidfd_send_signal(fd, number)
            os.close(fd)


def rlimits_for(limits: Limits, enforcement: Enforcement) -> dict[int, int]:
    """Return the rlimits of every process of a jail, at most our own hard limits.

    Without cgroups, they include the number of processes and the data size; not the address
    space, of which node and WebAssembly reserve gigabytes that they never use.
    """
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.disk,
    }
    if enforcement == "rlimits":
        wanted |= {resource.RLIMIT_NPROC: limits.pids, resource.RLIMIT_DATA: limits.memory}
    return {kind: _capped(kind, value) for kind, value in wanted.items() if value is not None}


def _capped(kind: int, value: int) -> int:
    _, hard = resource.getrlimit(kind)
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
