"""Where cgroups may go, from what a host says of itself: mounts here are plain directories."""

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
    """A cgroup2 mount in plain files, and what /proc says of it."""
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


def test_root_has_the_root_of_version_2(tmp_path: Path) -> None:
    found = survey(**cgroup2(tmp_path, "/system.slice/ssh.service"), privileged=True)
    assert found.enforcement == "cgroup-v2"
    assert found.parents == dict.fromkeys(("memory", "pids", "cpu"), f"{tmp_path}/smokebox")
    assert found.crowded is None
    (tmp_path / "smokebox").mkdir()
    (tmp_path / "smokebox" / "cgroup.subtree_control").write_text("")
    found.prepare()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_a_session_that_nobody_delegated_is_left_alone(tmp_path: Path) -> None:
    found = survey(**cgroup2(tmp_path, "/user.slice/session-2.scope"), privileged=False)
    assert found.enforcement == "rlimits"
    assert "session-2.scope is not delegated" in found.describe()
    assert "systemd-run --user" in found.describe()


def test_the_user_s_own_systemd_is_left_alone(tmp_path: Path) -> None:
    said = cgroup2(tmp_path, "/user@1000.service/init.scope")
    delegate(tmp_path / "user@1000.service")
    assert survey(**said, privileged=False).enforcement == "rlimits"


def test_in_a_delegated_scope_we_step_aside_and_use_it(tmp_path: Path) -> None:
    said = cgroup2(tmp_path, "/user.slice/run-7.scope")
    scope = tmp_path / "user.slice" / "run-7.scope"
    delegate(scope)
    found = survey(**said, privileged=False)
    assert (found.core, found.crowded) == (f"{scope}/smokebox", str(scope))
    leaf = scope / "smokebox-engine"
    for made in (leaf, scope / "smokebox"):
        made.mkdir()
        for file in ("cgroup.procs", "cgroup.subtree_control"):
            (made / file).write_text("")
    found.prepare()
    assert (leaf / "cgroup.procs").read_text() == str(os.getpid())
    assert (scope / "smokebox" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


STRANGER = (
    "import os, time; os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(60)"
)


def test_a_delegated_scope_with_strangers_in_it_is_left_alone(tmp_path: Path) -> None:
    said = cgroup2(tmp_path, "/run-7.scope")
    scope = tmp_path / "run-7.scope"
    delegate(scope)
    argv = [sys.executable, "-Sc", STRANGER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        stranger = int(parent.stdout.readline())
        parent.wait()
        (scope / "cgroup.procs").write_text(f"{os.getpid()}\n{stranger}\n")
        found = survey(**said, privileged=False)
        adopted = os.getpid() in ancestors(stranger)
        os.kill(stranger, signal.SIGKILL)
    if adopted:
        pytest.skip("whoever runs the tests adopts every orphan")
    assert (found.enforcement, found.crowded) == ("rlimits", None)
    assert "not ours to move" in found.why


def test_a_service_with_a_subgroup_for_us_is_used_beside_it(tmp_path: Path) -> None:
    said = cgroup2(tmp_path, "/smokebox.service/main")
    delegate(tmp_path / "smokebox.service")
    found = survey(**said, privileged=True)
    assert (found.core, found.crowded) == (f"{tmp_path}/smokebox.service/smokebox", None)


def test_a_container_with_cgroups_of_its_own_steps_aside(tmp_path: Path) -> None:
    found = survey(**cgroup2(tmp_path, "/", top=False), privileged=True)
    assert (found.core, found.crowded) == (f"{tmp_path}/smokebox", str(tmp_path))


def test_without_cpu_the_others_are_used_and_it_is_said(tmp_path: Path) -> None:
    said = cgroup2(tmp_path, "/run-7.scope")
    delegate(tmp_path / "run-7.scope")
    (tmp_path / "run-7.scope" / "cgroup.controllers").write_text("cpuset memory pids")
    found = survey(**said, privileged=False)
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


def test_version_1_is_used_apart_or_mounted_together(tmp_path: Path) -> None:
    said = cgroup1(tmp_path, "memory", "pids", "cpu,cpuacct", "freezer")
    found = survey(**said, privileged=True)
    assert found.enforcement == "cgroup-v1"
    assert found.parents == {
        "memory": f"{tmp_path}/memory/smokebox",
        "pids": f"{tmp_path}/pids/smokebox",
        "cpu": f"{tmp_path}/cpu,cpuacct/smokebox",
        "cpuacct": f"{tmp_path}/cpu,cpuacct/smokebox",
        "freezer": f"{tmp_path}/freezer/smokebox",
    }
    assert len(found.directories) == 4


def test_version_1_that_cannot_stop_a_jail_is_not_used(tmp_path: Path) -> None:
    found = survey(**cgroup1(tmp_path, "memory", "pids", "cpu"), privileged=True)
    assert (found.enforcement, found.why) == ("rlimits", "no cgroup of ours for freezer")


def test_a_host_without_cgroups_says_so() -> None:
    found = survey(mountinfo="1 0 0:1 / / rw - ext4 /dev/vda rw", membership="", privileged=True)
    assert "this host has no cgroups" in found.describe()


@pytest.mark.skipif(detect().enforcement == "rlimits", reason="no cgroups for us here")
def test_what_holds_is_described() -> None:
    text = detect().describe()
    assert detect().enforcement in text
    assert "memory, pids" in text
