"""Where the cgroups of jails go on this host, detected once per process."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.jail.cgroup import Cgroup, ProcessTree
from smokebox.engine.jail.kernfs import ancestors, read, write
from smokebox.errors import DeadlineExceeded, IsolationUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from smokebox.engine.jail.api import Enforcement
    from smokebox.limits import Limits

NAME = "smokebox"
ENGINE = "smokebox-engine"
CONTROLLERS = ("memory", "pids", "cpu")

# A cgroup without processes is its engine's until the first one enters, milliseconds later.
IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupPlacement:
    """Where the cgroups of jails go on this host.

    `parents` has the directory that holds them, by controller. `core` is the same in a
    cgroup2 mount, which freezes and kills even where version 1 has the controllers.
    `crowded` is a cgroup of our own whose processes must step aside before it can have
    children with limits. Without any, `why` says what is missing.
    """

    enforcement: Enforcement
    parents: Mapping[str, str] = field(default_factory=dict)
    core: str | None = None
    crowded: str | None = None
    why: str = ""

    @property
    def directories(self) -> tuple[str, ...]:
        """Every directory that holds jails' cgroups, each once, the core before the others."""
        found = [self.core] if self.core else []
        return tuple(dict.fromkeys([*found, *self.parents.values()]))

    def describe(self) -> str:
        """What holds and where, or what is missing and how to mend it, for people."""
        if self.enforcement == "rlimits":
            return (
                f"limits per process only (rlimits): {self.why}. For limits of a whole sandbox "
                "run as root, or: systemd-run --user --scope -p Delegate=yes smokebox ..."
            )
        held = ", ".join(name for name in CONTROLLERS if name in self.parents)
        lacking = [name for name in CONTROLLERS if name not in self.parents]
        text = f"{self.enforcement}: {held} in {self.parents['memory']}"
        if lacking:
            text += f"; not limited here: {', '.join(lacking)}"
        if self.core and self.enforcement == "cgroup-v1":
            text += f"; frozen and killed through {self.core}"
        return text

    def prepare(self) -> None:
        """Make the directories that hold jails' cgroups, and hand the controllers down."""
        if self.crowded:
            _step_aside(self.crowded)
        for directory in self.directories:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o755)
        if self.enforcement == "cgroup-v2" and self.core:
            wanted = " ".join(f"+{name}" for name in CONTROLLERS if name in self.parents)
            for directory in (os.path.dirname(self.core), self.core):
                write(f"{directory}/cgroup.subtree_control", wanted)


def survey(*, mountinfo: str, membership: str, privileged: bool) -> CgroupPlacement:
    """Read off `/proc/self/mountinfo` and `/proc/self/cgroup` where jails can go."""
    mounts = list(_mounts(mountinfo))
    own = {
        name: path
        for _, names, path in (line.split(":", 2) for line in membership.splitlines())
        for name in names.split(",")
    }
    unified = next((mount for mount in mounts if mount.version == 2), None)
    why = "this host has no cgroups"
    if unified:
        second = _second(unified, own.get("", "/"), privileged=privileged)
        if second.enforcement != "rlimits":
            return second
        why = second.why
    if any(mount.version == 1 for mount in mounts):
        return _first(mounts, own, unified, privileged=privileged)
    return CgroupPlacement(enforcement="rlimits", why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    version: int
    root: str
    point: str
    controllers: frozenset[str]

    def path(self, own: str) -> str:
        """Where the cgroup that /proc calls `own` is below the mount point."""
        inside = os.path.relpath(own, self.root)
        return self.point if inside.startswith(".") else f"{self.point}/{inside}"


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, point = left.split(" ")[3:5]
            yield _Mount(
                version=2 if kind == "cgroup2" else 1,
                root=root,
                point=point.replace("\\040", " "),
                controllers=frozenset(options.split(" ")[-1].split(",")),
            )


def _second(mount: _Mount, own: str, *, privileged: bool) -> CgroupPlacement:
    """Version 2: a cgroup that was delegated to us, or for root the root of them all."""
    where = mount.path(own)
    why = f"the cgroup {where} is not delegated to us"
    for base in (os.path.dirname(where), where, mount.point):
        # Only the root of all cgroups has no type, and may have both processes and limits.
        top = not os.path.exists(f"{base}/cgroup.type")
        if not f"{base}/".startswith(f"{mount.point}/"):
            continue
        if not (privileged if top else _delegated(base, mount)):
            continue
        offered = set(read(f"{base}/cgroup.controllers").split()) & set(CONTROLLERS)
        if not {"memory", "pids"} <= offered:
            why = f"{base} has no memory and pids controllers"
        elif not _writable(base):
            why = f"{base} is not writable"
        elif not top and not _all_ours(base):
            why = f"{base} holds processes that are not ours to move"
        else:
            return CgroupPlacement(
                enforcement="cgroup-v2",
                parents={name: f"{base}/{NAME}" for name in CONTROLLERS if name in offered},
                core=f"{base}/{NAME}",
                crowded=base if not top and read(f"{base}/cgroup.procs") else None,
            )
    return CgroupPlacement(enforcement="rlimits", why=why)


def _first(
    mounts: list[_Mount], own: dict[str, str], unified: _Mount | None, *, privileged: bool
) -> CgroupPlacement:
    """Version 1: each controller at its root, or where it was delegated to us."""
    parents: dict[str, str] = {}
    for name in (*CONTROLLERS, "freezer", "cpuacct"):
        for mount in (mount for mount in mounts if name in mount.controllers):
            for base in (mount.path(own.get(name, "/")), mount.point):
                if _writable(base) or _writable(f"{base}/{NAME}"):
                    parents[name] = f"{base}/{NAME}"
    shared = unified is not None and privileged and _writable(unified.point)
    core = f"{unified.point}/{NAME}" if unified and shared else None
    missing = {"memory", "pids"} - parents.keys()
    if missing or not (core or "freezer" in parents):
        lacking = ", ".join(sorted(missing or {"freezer"}))
        return CgroupPlacement(enforcement="rlimits", why=f"no cgroup of ours for {lacking}")
    if core:
        # It freezes and counts time, and each hierarchy less is an attach less.
        parents = {name: parents[name] for name in CONTROLLERS if name in parents}
    return CgroupPlacement(enforcement="cgroup-v1", parents=parents, core=core)


def _writable(directory: str) -> bool:
    return all(os.access(path, os.W_OK) for path in (directory, f"{directory}/cgroup.procs"))


def _delegated(directory: str, mount: _Mount) -> bool:
    """Whether systemd gave it to us, or it is the top of our own cgroup namespace."""
    if directory == mount.point:
        return True
    if os.path.exists(f"{directory}/init.scope"):
        # Given to the user's systemd, which minds it alone.
        return False
    with contextlib.suppress(OSError):
        return os.getxattr(directory, "user.delegate") == b"1"
    return False


def _all_ours(directory: str) -> bool:
    """Whether every process directly in a cgroup is us, came of us, or led to us."""
    inside = {int(line) for line in read(f"{directory}/cgroup.procs").split()}
    above = set(ancestors(os.getpid()))
    return all(pid in above or os.getpid() in ancestors(pid) for pid in inside)


def _step_aside(directory: str) -> None:
    """Move a cgroup's own processes into a leaf: only leaves may have both them and limits."""
    leaf = f"{directory}/{ENGINE}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(leaf, 0o755)
    # Once more for what they forked meanwhile.
    for _ in range(2):
        for pid in read(f"{directory}/cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                write(f"{leaf}/cgroup.procs", pid)


@functools.cache
def detect() -> Hierarchy:
    """What this host offers to this process. Nothing is changed before the first `create`."""
    return Hierarchy(
        survey(
            mountinfo=read("/proc/self/mountinfo"),
            membership=read("/proc/self/cgroup"),
            privileged=os.geteuid() == 0,
        )
    )


class Hierarchy:
    """What holds jails to their limits on this host."""

    def __init__(self, placement: CgroupPlacement) -> None:
        self.placement = placement

    @property
    def enforcement(self) -> Enforcement:
        """Which kind of limits hold here."""
        return self.placement.enforcement

    def describe(self) -> str:
        """What holds and where, or what is missing and how to mend it, for people."""
        return self.placement.describe()

    def create(self, key: str, limits: Limits) -> Cgroup:
        """Make a jail's cgroup and set its limits."""
        cgroup = self._cgroup(key)
        try:
            cgroup.make(limits)
        except OSError as error:
            with contextlib.suppress(OSError):
                cgroup.remove()
            raise IsolationUnavailable(
                f"cannot make the cgroup {key}: {error}",
                hint="`smokebox doctor` says which cgroups this host lets us use.",
                tier="namespaces",
            ) from error
        return cgroup

    def adopt(self, key: str, pid: int) -> Cgroup:
        """The cgroup of a jail that another engine made, whose first process is `pid`."""
        cgroup = self._cgroup(key)
        if isinstance(cgroup, ProcessTree):
            cgroup.attach(pid)
        return cgroup

    def sweep(
        self, live: Collection[str], *, prefix: str | None = None, idle: float = IDLE_SECONDS
    ) -> list[str]:
        """Remove what engines that died left behind, and return the keys.

        Several engines may share a host, and each knows only its own jails. With `prefix`,
        which begins the caller's keys and nobody else's, everything of that name but `live`
        is killed. Without, only what holds no process and is older than `idle` is removed.
        """
        swept = []
        for key in sorted(self._keys() - set(live)):
            cgroup = Cgroup(key, self.placement)
            if not (cgroup.abandoned(idle) if prefix is None else key.startswith(prefix)):
                continue
            with contextlib.suppress(DeadlineExceeded):
                cgroup.kill()
                cgroup.remove()
                swept.append(key)
        return swept

    def _cgroup(self, key: str) -> Cgroup:
        kind = ProcessTree if self.enforcement == "rlimits" else Cgroup
        return kind(key, self.placement)

    def _keys(self) -> set[str]:
        found: set[str] = set()
        for directory in self.placement.directories:
            with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
                found.update(entry.name for entry in entries if entry.is_dir())
        return found
