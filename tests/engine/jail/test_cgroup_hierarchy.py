"""Location of cgroups, found from descriptions of hosts; mounts are plain directories here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.jail.cgroup_hierarchy import detect, survey
from smokebox.engine.jail.kernfs import ancestors

if TYPE_CHECKING:
    from pathlib import Path


def cgroup2(root: Path, own: str, *, top: bool = True) -> dict[str, str]:
    """Create a cgroup2 mount of plain files, and return its description in /proc."""
    path = root
    for name in ["", *own.strip("/").split("/")]:
        path = path / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.controllers").write_text("cpuset cpu io memory pids")
        for file in ("cgroup.procs", "cgroup.subtree_control"):
            (path / file).write_text("")
        if not top or path != root:
            (path / "cgroup.type").write_text("domain")
    (path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return {
        "mountinfo": f"31 23 0:28 / {root} rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        "membership": f"0::{own}\n",
    }


def delegate(path: Path) -> None:
    try:
        os.setxattr(path, "user.delegate", b"1")
    except OSError:
        pytest.skip(f"no extended attributes in {path}")


def test_root_uses_root_cgroup_of_version_2(tmp_path: Path) -> None:
    found = survey(**cgroup2(tmp_path, "/system.slice/ssh.service"), privileged=True)
    assert found.enforcement == "cgroup-v2"
    assert found.parents == dict.fromkeys(("memory", "pids", "cpu"), f"{tmp_path}/smokebox")
    assert found.crowded is None
    (tmp_path / "smokebox").mkdir()
    (tmp_path / "smokebox" / "cgroup.subtree_control").write_text("")
    found.prepare()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_session_that_is_not_delegated_is_not_used(tmp_path: Path) -> None:
    found = survey(**cgroup2(tmp_path, "/user.slice/session-2.scope"), privileged=False)
    assert found.enforcement == "rlimits"
    assert "session-2.scope is not delegated" in found.describe()
    assert "systemd-run --user" in found.describe()


def test_cgroup_of_user_systemd_is_not_used(tmp_path: Path) -> None:
    proc = cgroup2(tmp_path, "/user@1000.service/init.scope")
    delegate(tmp_path / "user@1000.service")
    assert survey(**proc, privileged=False).enforcement == "rlimits"


def test_delegated_scope_is_used_after_moving_to_leaf(tmp_path: Path) -> None:
    proc = cgroup2(tmp_path, "/user.slice/run-7.scope")
    scope = tmp_path / "user.slice" / "run-7.scope"
    delegate(scope)
    found = survey(**proc, privileged=False)
    assert (found.core, found.crowded) == (f"{scope}/smokebox", str(scope))
    leaf = scope / "smokebox-engine"
    for directory in (leaf, scope / "smokebox"):
        directory.mkdir()
        for file in ("cgroup.procs", "cgroup.subtree_control"):
            (directory / file).write_text("")
    found.prepare()
    assert (leaf / "cgroup.procs").read_text() == str(os.getpid())
    assert (scope / "smokebox" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


DAEMON = (
    "import os, time; os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(60)"
)


def test_delegated_scope_with_other_processes_is_not_used(tmp_path: Path) -> None:
    proc = cgroup2(tmp_path, "/run-7.scope")
    scope = tmp_path / "run-7.scope"
    delegate(scope)
    argv = [sys.executable, "-Sc", DAEMON]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        daemon = int(parent.stdout.readline())
        parent.wait()
        (scope / "cgroup.procs").write_text(f"{os.getpid()}\n{daemon}\n")
        found = survey(**proc, privileged=False)
        reparented = os.getpid() in ancestors(daemon)
        os.kill(daemon, signal.SIGKILL)
    if reparented:
        pytest.skip("a parent of the tests is a subreaper")
    assert (found.enforcement, found.crowded) == ("rlimits", None)
    assert "processes of others" in found.why


def test_delegated_service_is_used_beside_our_subgroup(tmp_path: Path) -> None:
    proc = cgroup2(tmp_path, "/smokebox.service/main")
    delegate(tmp_path / "smokebox.service")
    found = survey(**proc, privileged=True)
    assert (found.core, found.crowded) == (f"{tmp_path}/smokebox.service/smokebox", None)


def test_container_moves_to_leaf_of_its_root_cgroup(tmp_path: Path) -> None:
    found = survey(**cgroup2(tmp_path, "/", top=False), privileged=True)
    assert (found.core, found.crowded) == (f"{tmp_path}/smokebox", str(tmp_path))


def test_missing_cpu_controller_is_reported(tmp_path: Path) -> None:
    proc = cgroup2(tmp_path, "/run-7.scope")
    delegate(tmp_path / "run-7.scope")
    (tmp_path / "run-7.scope" / "cgroup.controllers").write_text("cpuset memory pids")
    found = survey(**proc, privileged=False)
    assert sorted(found.parents) == ["memory", "pids"]
    assert "not limited here: cpu" in found.describe()


def cgroup1(root: Path, *controllers: str) -> dict[str, str]:
    for name in controllers:
        (root / name).mkdir()
        (root / name / "cgroup.procs").write_text("")
    lines = [
        f"{n} 31 0:{n} / {root}/{name} rw,relatime - cgroup cgroup rw,{name}"
        for n, name in enumerate(controllers)
    ]
    own = [f"{n}:{name}:/deep/below" for n, name in enumerate(controllers)]
    return {"mountinfo": "\n".join(lines), "membership": "\n".join(own)}


def test_version_1_controllers_are_used_apart_or_mounted_together(tmp_path: Path) -> None:
    proc = cgroup1(tmp_path, "memory", "pids", "cpu,cpuacct", "freezer")
    found = survey(**proc, privileged=True)
    assert found.enforcement == "cgroup-v1"
    assert found.parents == {
        "memory": f"{tmp_path}/memory/smokebox",
        "pids": f"{tmp_path}/pids/smokebox",
        "cpu": f"{tmp_path}/cpu,cpuacct/smokebox",
        "cpuacct": f"{tmp_path}/cpu,cpuacct/smokebox",
        "freezer": f"{tmp_path}/freezer/smokebox",
    }
    assert len(found.directories) == 4


def test_version_1_without_freezer_is_not_used(tmp_path: Path) -> None:
    found = survey(**cgroup1(tmp_path, "memory", "pids", "cpu"), privileged=True)
    assert (found.enforcement, found.why) == ("rlimits", "no writable cgroup for freezer")


def test_missing_cgroups_are_reported() -> None:
    found = survey(mountinfo="1 0 0:1 / / rw - ext4 /dev/vda rw", membership="", privileged=True)
    assert "this host has no cgroups" in found.describe()


@pytest.mark.skipif(detect().enforcement == "rlimits", reason="no cgroups are available here")
def test_description_names_limits() -> None:
    text = detect().describe()
    assert detect().enforcement in text
    assert "memory, pids" in text
