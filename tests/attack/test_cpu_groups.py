"""Attacks on the shares of the CPU: a sandbox can leave neither its cgroup nor its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cpu_groups import NO_WEIGHTS, cgroup, create, directory_for_layers, open_host
from smokebox.engine.images.build.builds import BuildRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(bool(NO_WEIGHTS), reason=NO_WEIGHTS)

# Prints what succeeds. The shell and its tools are those of busybox.
ATTACK = """
FILES='cgroup.procs cgroup.threads tasks cgroup.subtree_control cgroup.kill cgroup.freeze
cpu.shares cpu.weight cpu.weight.nice cpu.max cpu.cfs_quota_us release_agent notify_on_release'
try() { "$@" >/dev/null 2>&1 && echo "done: $*"; }
put() { [ -e "$2" ] && (echo "$1" > "$2") 2>/dev/null && echo "written: $2"; }
busybox mkdir -p /tmp/c
try busybox mount -t cgroup2 none /tmp/c
for controller in cpu cpuset cpuacct memory pids freezer devices name=systemd; do
    try busybox mount -t cgroup -o $controller none /tmp/c
done
for top in /sys /tmp/c /proc/1/root/sys /dev /run; do
    for file in $FILES; do
        for path in $top/$file $top/fs/cgroup/$file $top/fs/cgroup/*/$file; do
            put 1 $path
        done
    done
done
for process in /proc/[0-9]*; do
    put / $process/cgroup
    for fd in $process/fd/*; do
        case "$(busybox readlink $fd 2>/dev/null)" in
            *cgroup*|*tasks*|*cpu.*) echo "open: $fd" ;;
        esac
        for file in $FILES; do
            put 1 $fd/$file
        done
    done
done
try busybox unshare -m -u -i -p busybox true
try busybox unshare -U busybox true
try busybox nice -n -20 busybox true
try busybox renice -n -20 -p 1
try busybox chrt -f 99 busybox true
try busybox chrt -r -p 99 1
busybox true
"""
WEIGHTS = ("cpu.shares", "cpu.weight", "cpu.max", "cpu.cfs_quota_us", "cgroup.subtree_control")


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A directory that layers can be in, also in user-mode Linux."""
    with directory_for_layers(tmp_path) as base:
        yield base


def weights(sandbox_cgroup: Path) -> dict[str, str]:
    """Return the settings of a cgroup, its group, and what all groups are in."""
    above = [sandbox_cgroup, *list(sandbox_cgroup.parents)[:2]]
    found = [one / name for one in above for name in WEIGHTS]
    return {str(path): path.read_text() for path in found if path.exists()}


async def test_sandbox_cannot_leave_its_group_or_change_weights(base: Path) -> None:
    async with open_host(base) as host:
        sandbox = await create(host, "attacker-0")
        other = await create(host, "victim-0")
        place, before = cgroup(sandbox), weights(cgroup(sandbox))
        assert "group-" in place.parent.name
        victim = weights(cgroup(other))
        result = await sandbox.exec(["sh", "-c", ATTACK])
        assert (result.stdout, result.exit_code) == ("", 0), result
        # All its processes are in it still.
        assert cgroup(sandbox) == place
        assert (weights(place), weights(cgroup(other))) == (before, victim)


async def test_step_of_a_build_cannot_leave_its_group(base: Path) -> None:
    async with open_host(base) as host:
        dockerfile = f"FROM dir:small\nRUN <<'END'\n{ATTACK}\nEND\n"
        events = host.builds.run(BuildRequest(dockerfile=dockerfile, group="attacker"))
        output = [event.data async for event in events if event.kind == "output"]
    assert output == []
