"""The cgroup of one jail: its limits, its processes and the kernel's accounting of them.

Hosts without cgroups get per-process rlimits and sums over /proc instead (`ProcessTree`). Every
call blocks briefly, and `attach` for as long as the kernel waits for its readers (6 to 15 ms
after a quiet period): callers on an event loop use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.jail import kernfs
from smokebox.engine.jail.api import JailStats
from smokebox.engine.jail.kernfs import field, number, read, write, write_if_there
from smokebox.errors import Conflict, DeadlineExceeded, InvalidOption, LimitReached, SandboxGone
from smokebox.runtime.supervisor import descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from smokebox.engine.jail.api import Enforcement
    from smokebox.engine.jail.cgroup_hierarchy import CgroupPlacement
    from smokebox.limits import Limits

FREEZE_SECONDS = 2.0
KILL_SECONDS = 5.0
REMOVE_SECONDS = 2.0

_PERIOD_US = 100_000
_ATTACH_ROUNDS = 8
_SIGNAL_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """Why the kernel killed something in a jail: it wanted more memory than `limit`."""

    count: int
    limit: int | None

    def __str__(self) -> str:
        if self.limit is None:
            return "out of memory (the host has no more)"
        return f"out of memory (limit {self.limit / (1 << 20):.4g} MiB)"


class Cgroup:
    """What the kernel counts and limits of one jail. `Hierarchy.create` makes it."""

    def __init__(self, key: str, placement: CgroupPlacement) -> None:
        if not key or "/" in key or key.startswith("."):
            raise InvalidOption(
                f"not the name of a cgroup: {key!r}",
                hint="Use letters, digits and dashes.",
                option="key",
                value=key,
            )
        self.key = key
        self.placement = placement
        self._core = f"{placement.core}/{key}" if placement.core else None
        self._paths = {name: f"{parent}/{key}" for name, parent in placement.parents.items()}
        self._directories = [f"{parent}/{key}" for parent in placement.directories]
        self._last = JailStats()
        self._memory: int | None = None

    @property
    def joined(self) -> bool:
        """Whether a process cloned into `open()` is in, and needs no `attach`."""
        return self.placement.enforcement == "cgroup-v2"

    def open(self) -> int | None:
        """A descriptor for CLONE_INTO_CGROUP, which the caller closes; None without cgroup2."""
        if self._core is None:
            return None
        with self._there():
            return os.open(self._core, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def attach(self, pid: int) -> None:
        """Bring a process in, with what it forks meanwhile.

        What it forked before is found only if it was cloned into `open()`; otherwise attach
        the first process of a jail before it forks.
        """
        done: set[int] = set()
        for _ in range(_ATTACH_ROUNDS):
            fresh = {pid, *self.pids()} - done
            if not fresh:
                return
            for member in fresh:
                with self._there():
                    self._attach(member, must=member == pid)
            done |= fresh

    def _attach(self, pid: int, *, must: bool) -> None:
        # The one that `pids` reads comes first, so that a fork between two is seen.
        for directory in self._directories:
            if directory == self._core and pid in self.pids():
                continue
            try:
                write(f"{directory}/cgroup.procs", str(pid))
            except ProcessLookupError as error:
                if must:
                    raise SandboxGone(
                        f"process {pid} ended before it could be held to its limits",
                        reason="exited",
                    ) from error
                return

    def set_limits(self, limits: Limits) -> None:
        """Hold it to these limits from here on."""
        with self._there():
            self._set_limits(limits)

    def _set_limits(self, limits: Limits) -> None:
        self._limit_memory(limits.memory)
        if "pids" in self._paths:
            write(f"{self._paths['pids']}/pids.max", _or_max(limits.pids))
        if "cpu" in self._paths:
            self._limit_cpu(limits.cpu)

    def stats(self) -> JailStats:
        """What it uses; memory is without the page cache that the kernel would give back."""
        memory = self._paths.get("memory", "")
        used = number(f"{memory}/{self._pick('memory.current', 'memory.usage_in_bytes')}")
        idle = self._pick("inactive_file", "total_inactive_file")
        cache = field(f"{memory}/memory.stat", idle) or 0
        self._last = JailStats(
            cpu_seconds=self._cpu_seconds(),
            memory=None if used is None else max(0, used - cache),
            memory_peak=number(
                f"{memory}/{self._pick('memory.peak', 'memory.max_usage_in_bytes')}"
            ),
            pids=number(f"{self._paths.get('pids', '')}/pids.current"),
            oom_kills=self.oom_kills(),
        )
        return self._last

    def oom_kills(self) -> int | None:
        """How many of its processes were killed for want of memory; kept after `remove`."""
        file = self._pick("memory.events", "memory.oom_control")
        count = field(f"{self._paths.get('memory', '')}/{file}", "oom_kill")
        return self._last.oom_kills if count is None else count

    def last_death(self, since: int = 0) -> OomKill | None:
        """Why the kernel killed something, if it did after `oom_kills()` was `since`."""
        count = self.oom_kills()
        if count is None or count <= since:
            return None
        return OomKill(count=count, limit=self._memory_limit())

    def pids(self) -> list[int]:
        """The living processes in it, in our numbering."""
        lines = read(f"{self._directories[0]}/cgroup.procs").split()
        # Zero is a process outside of our own pid namespace.
        return [int(line) for line in lines if line != "0"]

    def abandoned(self, seconds: float) -> bool:
        """Whether it has no process, and is too old to wait for its first."""
        made = []
        for path in self._directories:
            # Its own engine may remove it at this moment.
            with contextlib.suppress(FileNotFoundError):
                made.append(os.stat(path).st_ctime)
        return not self.pids() and time.time() - max(made, default=0.0) >= seconds

    def freeze(self, timeout: float = FREEZE_SECONDS) -> None:
        """Stop every process, and return when all have; all go on if that takes too long."""
        with self._there():
            self._hold(True)
        for _ in _until(timeout):
            if self._frozen():
                return
        self.thaw()
        raise DeadlineExceeded(
            f"the processes of {self.key} did not stop within {timeout} s",
            hint="One of them waits for a device or a remote file system; kill it instead.",
            operation="freeze",
            timeout=timeout,
        )

    def thaw(self) -> None:
        """Let them go on."""
        with self._there():
            self._hold(False)

    def kill(self, timeout: float = KILL_SECONDS) -> None:
        """Kill every process, frozen or not, and return when none is left. Safe to repeat."""
        for _ in _until(timeout):
            self._strike()
            if not self.pids():
                return
        raise DeadlineExceeded(
            f"processes {self.pids()[:5]} of {self.key} outlived SIGKILL by {timeout} s",
            hint="The kernel holds them, most often for a file system that does not answer.",
            operation="kill",
            timeout=timeout,
        )

    def remove(self, timeout: float = REMOVE_SECONDS) -> None:
        """Remove it once its processes are gone. Safe to repeat."""
        self._last = JailStats(oom_kills=self.oom_kills())
        self._memory = self._memory_limit()
        left = list(self._directories)
        for _ in _until(timeout):
            left = [path for path in left if not _remove(path)]
            if not left:
                return
        raise DeadlineExceeded(
            f"cgroup {left[0]} is still in use, by {self.pids()[:5] or 'nobody we see'}",
            hint="Kill what is in it first.",
            operation="remove",
            timeout=timeout,
        )

    def make(self, limits: Limits) -> None:
        """Make its directories and set the limits."""
        try:
            self._make_directories(limits)
        except FileNotFoundError:
            self.placement.prepare()
            self._make_directories(limits)

    def _make_directories(self, limits: Limits) -> None:
        for directory in self._directories:
            # What a former life left would still count its deaths.
            if not _remove(directory):
                raise Conflict(
                    f"the cgroup {directory} is in use",
                    hint="Kill what is in it first.",
                    kind="cgroup",
                    name=self.key,
                )
            os.mkdir(directory, 0o755)
        self._set_limits(limits)

    def _pick(self, second: str, first: str) -> str:
        return second if self.placement.enforcement == "cgroup-v2" else first

    def _limit_memory(self, limit: int | None) -> None:
        if "memory" not in self._paths:
            return
        memory = self._paths["memory"]
        if self.placement.enforcement == "cgroup-v2":
            write(f"{memory}/memory.max", _or_max(limit))
            write_if_there(f"{memory}/memory.swap.max", _or_max(None if limit is None else 0))
            return
        ram, swap = f"{memory}/memory.limit_in_bytes", f"{memory}/memory.memsw.limit_in_bytes"
        text = str(-1 if limit is None else limit)
        try:
            # With swap can never be less than without, not even between two writes.
            if _less(limit, number(ram)):
                write(ram, text)
                write_if_there(swap, text)
            else:
                write_if_there(swap, text)
                write(ram, text)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise LimitReached(
                f"{self.key} uses more memory than {limit} bytes",
                hint="Stop some of its processes first, or allow it more.",
                limit="memory",
            ) from error

    def _limit_cpu(self, cpu: float | None) -> None:
        quota = None if cpu is None else round(cpu * _PERIOD_US)
        path = self._paths["cpu"]
        if self.placement.enforcement == "cgroup-v2":
            write(f"{path}/cpu.max", f"{_or_max(quota)} {_PERIOD_US}")
            return
        write(f"{path}/cpu.cfs_period_us", str(_PERIOD_US))
        write(f"{path}/cpu.cfs_quota_us", str(-1 if quota is None else quota))

    def _memory_limit(self) -> int | None:
        file = self._pick("memory.max", "memory.limit_in_bytes")
        text = read(f"{self._paths.get('memory', '')}/{file}").strip()
        if not text:
            return self._memory
        # Version 1 says "none" with the greatest number of whole pages.
        return int(text) if text.isdigit() and int(text) < 1 << 62 else None

    def _cpu_seconds(self) -> float | None:
        if self._core:
            spent = field(f"{self._core}/cpu.stat", "usage_usec")
            return None if spent is None else spent / 1e6
        spent = number(f"{self._paths.get('cpuacct', '')}/cpuacct.usage")
        return None if spent is None else spent / 1e9

    def _hold(self, still: bool) -> None:
        if self._core:
            write(f"{self._core}/cgroup.freeze", str(int(still)))
        else:
            state = "FROZEN" if still else "THAWED"
            write(f"{self._paths['freezer']}/freezer.state", state)

    def _frozen(self) -> bool:
        if self._core:
            return field(f"{self._core}/cgroup.events", "frozen") == 1
        return read(f"{self._paths['freezer']}/freezer.state").strip() == "FROZEN"

    def _strike(self) -> None:
        if self._core and write_if_there(f"{self._core}/cgroup.kill", "1"):
            return
        with contextlib.suppress(SandboxGone, DeadlineExceeded):
            self.freeze()
        # Frozen, none can fork, or end and leave its number to a stranger.
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(SandboxGone):
            self.thaw()

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # ENODEV: removed while a file of it was open.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            raise SandboxGone(
                f"the cgroup of {self.key} is gone, and its processes with it",
                hint="Start the sandbox again.",
                reason="removed",
            ) from error


def _until(timeout: float) -> Iterator[None]:
    """Go round at once and then ever more slowly, until the time is up."""
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


def _less(limit: int | None, than: int | None) -> bool:
    return limit is not None and than is not None and limit < than


class ProcessTree(Cgroup):
    """The same for a host without cgroups: `rlimits_for` limits, and /proc counts.

    Nothing limits the sum of a jail's processes here, and nobody counts what was killed.
    The processes are what `pids` lists, and otherwise the attached one and those below it.
    """

    def __init__(
        self, key: str, placement: CgroupPlacement, pids: Callable[[], Iterable[int]] | None = None
    ) -> None:
        super().__init__(key, placement)
        self._list = pids
        self._first: int | None = None

    def attach(self, pid: int) -> None:
        """Take a process for the first of the jail."""
        self._first = pid

    def pids(self) -> list[int]:
        """The jail's processes, in our numbering."""
        if self._list is not None:
            return list(self._list())
        if self._first is None:
            return []
        alone = [self._first] if kernfs.state(self._first) not in "ZX" else []
        return [*alone, *descendants(self._first)]

    def stats(self) -> JailStats:
        """The sums over its processes: memory by share, cpu with the children they reaped."""
        pids = self.pids()
        return JailStats(
            cpu_seconds=sum(kernfs.cpu_seconds(pid) for pid in pids),
            memory=sum(kernfs.resident(pid) for pid in pids),
            pids=sum(kernfs.threads(pid) for pid in pids),
        )

    def _hold(self, still: bool) -> None:
        number = signal.SIGSTOP if still else signal.SIGCONT
        pids = self.pids()
        for start in range(0, len(pids), _SIGNAL_BATCH):
            self._signal(pids[start : start + _SIGNAL_BATCH], number)

    def _frozen(self) -> bool:
        running = [pid for pid in self.pids() if kernfs.state(pid) not in "TtZX"]
        self._signal(running[:_SIGNAL_BATCH], signal.SIGSTOP)
        return not running

    def _strike(self) -> None:
        pids = self.pids()
        for start in range(0, len(pids), _SIGNAL_BATCH):
            self._signal(pids[start : start + _SIGNAL_BATCH], signal.SIGKILL)

    def _signal(self, pids: list[int], number: int) -> None:
        """Signal those of `pids` that still are the jail's once we hold them."""
        held: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
        still = set(self.pids()) if held else set()
        for pid, fd in held.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid in still:
                    signal.pidfd_send_signal(fd, number)
            os.close(fd)


def rlimits_for(limits: Limits, enforcement: Enforcement) -> dict[int, int]:
    """What `setrlimit` holds every process of a jail to, none above our own hard limits.

    Without cgroups, also how many processes and how much data; not address space, of which
    node and WebAssembly reserve gigabytes that they never use.
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
