"""Location of the cgroups of jails on this host, detected once per process."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.jail.cgroup import BUFFERS, GROUP, Cgroup, ProcessTree, limit_cpu
from smokebox.engine.jail.kernfs import ancestors, read, write, write_if_exists
from smokebox.errors import DeadlineExceeded, IsolationUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from smokebox.engine.jail.spec import Enforcement
    from smokebox.limits import Limits

NAME = "smokebox"
ENGINE = "smokebox-engine"
CONTROLLERS = ("memory", "pids", "cpu")

# The first process of a new cgroup is attached milliseconds after it was created.
IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupPlacement:
    """Location of the cgroups of jails on this host.

    `parents` has their parent directory by controller. `core` is their parent in a cgroup2 mount,
    which freezes and kills even where version 1 has the controllers. `crowded` is a cgroup whose
    processes, ours among them, must move to a leaf before it can have children with limits. If
    there is no location, `why` says what is missing.
    """

    enforcement: Enforcement
    parents: Mapping[str, str] = field(default_factory=dict)
    core: str | None = None
    crowded: str | None = None
    why: str = ""

    @property
    def directories(self) -> tuple[str, ...]:
        """Every parent directory once, the core first."""
        found = [self.core] if self.core else []
        return tuple(dict.fromkeys([*found, *self.parents.values()]))

    def inside(self, directory: str, group: str) -> str:
        """Return where the cgroups of a group lie in one of the directories."""
        # In version 2 there is only one, and in version 1 the others have no weights.
        return (
            f"{directory}/{group}" if group and directory == self.parents.get("cpu") else directory
        )

    def describe(self) -> str:
        """Describe the limits that apply, or what is missing and how to fix it."""
        if self.enforcement == "rlimits":
            return (
                f"limits per process only (rlimits): {self.why}. For limits of a whole sandbox "
                "run as root, or: systemd-run --user --scope -p Delegate=yes smokebox ..."
            )
        limited = ", ".join(name for name in CONTROLLERS if name in self.parents)
        missing = [name for name in CONTROLLERS if name not in self.parents]
        text = f"{self.enforcement}: {limited} in {self.parents['memory']}"
        if missing:
            text += f"; not limited here: {', '.join(missing)}"
        if self.core and self.enforcement == "cgroup-v1":
            text += f"; frozen and killed through {self.core}"
        return text

    def prepare(self) -> None:
        """Create the parent directories, and enable the controllers in them."""
        if self.crowded:
            _move_to_leaf(self.crowded)
        for directory in self.directories:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o755)
        if self.enforcement == "cgroup-v1" and "memory" in self.parents:
            # The kernel patches its code for the first cgroup that counts network buffers, and
            # again after the last: this one stays.
            write_if_exists(f"{self.parents['memory']}/{BUFFERS}", "-1")
        if self.enforcement == "cgroup-v2" and self.core:
            for directory in (os.path.dirname(self.core), self.core):
                self._enable_controllers(directory)

    def make_group(self, group: str) -> None:
        """Create the cgroup of a group, where there are weights. Safe to repeat."""
        if not group or "cpu" not in self.parents:
            return
        directory = self.inside(self.parents["cpu"], group)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)
        if self.enforcement == "cgroup-v2":
            self._enable_controllers(directory)

    def limit_group(self, group: str, cpu: float | None) -> None:
        """Limit the cores that all members of a group use together; None is no limit.

        A group of version 1 keeps its limit while a member has a higher one.
        """
        if group and "cpu" in self.parents:
            try:
                limit_cpu(self.inside(self.parents["cpu"], group), cpu, self.enforcement)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENODEV):
                    raise

    def remove_group(self, group: str) -> None:
        """Remove the cgroup of a group if no other is in it."""
        if group and "cpu" in self.parents:
            with contextlib.suppress(OSError):
                os.rmdir(self.inside(self.parents["cpu"], group))

    def _enable_controllers(self, directory: str) -> None:
        wanted = " ".join(f"+{name}" for name in CONTROLLERS if name in self.parents)
        write(f"{directory}/cgroup.subtree_control", wanted)


def survey(*, mountinfo: str, membership: str, privileged: bool) -> CgroupPlacement:
    """Find the location from `/proc/self/mountinfo` and `/proc/self/cgroup`."""
    mounts = list(_mounts(mountinfo))
    own = {
        name: path
        for _, names, path in (line.split(":", 2) for line in membership.splitlines())
        for name in names.split(",")
    }
    unified = next((mount for mount in mounts if mount.version == 2), None)
    why = "this host has no cgroups"
    if unified:
        placement = _survey_v2(unified, own.get("", "/"), privileged=privileged)
        if placement.enforcement != "rlimits":
            return placement
        why = placement.why
    if any(mount.version == 1 for mount in mounts):
        return _survey_v1(mounts, own, unified, privileged=privileged)
    return CgroupPlacement(enforcement="rlimits", why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    version: int
    root: str
    point: str
    controllers: frozenset[str]

    def path(self, own: str) -> str:
        """Return the directory of the cgroup `own` of /proc below the mount point."""
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


def _survey_v2(mount: _Mount, own: str, *, privileged: bool) -> CgroupPlacement:
    """Find a cgroup of version 2 that is delegated to us, or for root the root cgroup."""
    current = mount.path(own)
    why = f"the cgroup {current} is not delegated to us"
    for base in (os.path.dirname(current), current, mount.point):
        # Only the root cgroup has no type, and may have both processes and limits.
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
            why = f"{base} holds processes of others, which we cannot move"
        else:
            return CgroupPlacement(
                enforcement="cgroup-v2",
                parents={name: f"{base}/{NAME}" for name in CONTROLLERS if name in offered},
                core=f"{base}/{NAME}",
                crowded=base if not top and read(f"{base}/cgroup.procs") else None,
            )
    return CgroupPlacement(enforcement="rlimits", why=why)


def _survey_v1(
    mounts: list[_Mount], own: dict[str, str], unified: _Mount | None, *, privileged: bool
) -> CgroupPlacement:
    """Find each controller of version 1, at its root or where it is delegated to us."""
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
        names = ", ".join(sorted(missing or {"freezer"}))
        return CgroupPlacement(enforcement="rlimits", why=f"no writable cgroup for {names}")
    if core:
        # It freezes and counts CPU time, and each hierarchy less is an attach less.
        parents = {name: parents[name] for name in CONTROLLERS if name in parents}
    return CgroupPlacement(enforcement="cgroup-v1", parents=parents, core=core)


def _writable(directory: str) -> bool:
    return all(os.access(path, os.W_OK) for path in (directory, f"{directory}/cgroup.procs"))


def _delegated(directory: str, mount: _Mount) -> bool:
    """Return True if systemd delegated it to us, or it is the root of our cgroup namespace."""
    if directory == mount.point:
        return True
    if os.path.exists(f"{directory}/init.scope"):
        # Delegated to the user's systemd, which manages it.
        return False
    with contextlib.suppress(OSError):
        return os.getxattr(directory, "user.delegate") == b"1"
    return False


def _all_ours(directory: str) -> bool:
    """Return True if every process directly in a cgroup is our ancestor or descendant."""
    inside = {int(line) for line in read(f"{directory}/cgroup.procs").split()}
    above = set(ancestors(os.getpid()))
    return all(pid in above or os.getpid() in ancestors(pid) for pid in inside)


def _move_to_leaf(directory: str) -> None:
    """Move the processes of a cgroup into a leaf: only leaves may have both them and limits."""
    leaf = f"{directory}/{ENGINE}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(leaf, 0o755)
    # Twice, for children forked meanwhile.
    for _ in range(2):
        for pid in read(f"{directory}/cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                write(f"{leaf}/cgroup.procs", pid)


@functools.cache
def detect() -> Hierarchy:
    """Return the cgroups of this host. Nothing is changed before the first `create`."""
    return Hierarchy(
        survey(
            mountinfo=read("/proc/self/mountinfo"),
            membership=read("/proc/self/cgroup"),
            privileged=os.geteuid() == 0,
        )
    )


class Hierarchy:
    """Creates and finds the cgroups of jails on this host."""

    def __init__(self, placement: CgroupPlacement) -> None:
        self.placement = placement

    @property
    def enforcement(self) -> Enforcement:
        """Kind of limits on this host."""
        return self.placement.enforcement

    def describe(self) -> str:
        """Describe the limits that apply, or what is missing and how to fix it."""
        return self.placement.describe()

    def create(self, key: str, limits: Limits, group: str = "") -> Cgroup:
        """Create the cgroup of a jail, in that of a group if it has one, and set its limits."""
        cgroup = self._cgroup(key, group)
        try:
            cgroup.make(limits)
        except OSError as error:
            with contextlib.suppress(OSError):
                cgroup.remove()
            raise IsolationUnavailable(
                f"cannot create the cgroup {key}: {error}",
                hint="Run `smokebox doctor` to see which cgroups this host allows.",
                tier="namespaces",
            ) from error
        return cgroup

    def adopt(self, key: str, pid: int, group: str = "") -> Cgroup:
        """Return the cgroup of a jail that another engine created, whose first process is `pid`."""
        cgroup = self._cgroup(key, group)
        if isinstance(cgroup, ProcessTree):
            cgroup.attach(pid)
        return cgroup

    def sweep(
        self, live: Collection[str], *, prefix: str | None = None, idle: float = IDLE_SECONDS
    ) -> list[str]:
        """Remove cgroups that dead engines left behind, and return their keys.

        Several engines may share a host, and each knows only its own jails. With `prefix`, which
        only the keys of the caller start with, all such cgroups except `live` are killed and
        removed. Without it, only those without processes and older than `idle` are removed. Groups
        that nothing is in are removed in any case: `create` makes them again.
        """
        swept = []
        keys, groups = self._find()
        for key in sorted(keys.keys() - set(live)):
            cgroup = Cgroup(key, self.placement, keys[key])
            if not (cgroup.abandoned(idle) if prefix is None else key.startswith(prefix)):
                continue
            with contextlib.suppress(DeadlineExceeded):
                cgroup.kill()
                cgroup.remove()
                swept.append(key)
        for group in groups:
            self.placement.remove_group(group)
        return swept

    def _cgroup(self, key: str, group: str) -> Cgroup:
        kind = ProcessTree if self.enforcement == "rlimits" else Cgroup
        return kind(key, self.placement, group)

    def _find(self) -> tuple[dict[str, str], set[str]]:
        """Return the group of each key, "" if it has none, and all groups."""
        keys: dict[str, str] = {}
        groups: set[str] = set()
        for directory in self.placement.directories:
            for name in _subdirectories(directory):
                if name.startswith(GROUP):
                    groups.add(name)
                    keys.update(dict.fromkeys(_subdirectories(f"{directory}/{name}"), name))
                else:
                    keys.setdefault(name, "")
        return keys, groups


def _subdirectories(directory: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_dir()]
    return []
