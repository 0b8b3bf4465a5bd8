"""`smokebox doctor` on this machine, and with missing programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cli.terminal import SMOKEBOX
from smokebox.cli.doctor import Check, check_orphans
from smokebox.engine.host import Host
from smokebox.engine.orphans import find_orphans

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Run


def checks_by_name(env: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [SMOKEBOX, "doctor", "--json"],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return {check["name"]: check for check in json.loads(done.stdout)}


def test_required_checks_pass_on_this_machine(run: Run) -> None:
    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python            {sys.version.split()[0]}" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_has_name_status_and_fix() -> None:
    checks = checks_by_name().values()
    assert {check["status"] for check in checks} <= {"ok", "optional"}
    assert all(check["fix"] for check in checks if check["status"] != "ok")
    assert not any(check["fix"] for check in checks if check["status"] == "ok")


def test_missing_program_has_an_install_command(tmp_path: Path) -> None:
    (tmp_path / "apt-get").touch(mode=0o755)
    git = checks_by_name({"PATH": str(tmp_path)})["git"]
    assert (git["status"], git["fix"]) == ("optional", "apt-get install -y git")


RUNSC_OUTPUT = {
    "20221219": "runsc version 0.0~20221219.0\nspec: 1.0.2-dev",
    "20240729": "runsc version 0.0~20240729.0\nspec: 1.1.0-rc.1",
    "20251215": "runsc version release-20251215.0\nspec: 1.1.0-rc.1",
    "unknown": "runsc version VERSION_MISSING",
}


@pytest.mark.parametrize("release", RUNSC_OUTPUT)
def test_old_release_of_runsc_has_a_fix(tmp_path: Path, release: str) -> None:
    runsc = tmp_path / "runsc"
    runsc.write_text(f"#!/bin/sh\ncat <<E\n{RUNSC_OUTPUT[release]}\nE\n")
    runsc.chmod(0o755)
    check = checks_by_name({"SMOKEBOX_RUNSC": str(runsc)})["runsc"]
    assert check["detail"].startswith(f"{runsc}, release {release}")
    if release == "20221219":
        assert "`ls` and `stat` of coreutils 9 fail with EINVAL" in check["detail"]
        assert "Debian 13" in check["fix"]
        assert "SMOKEBOX_RUNSC" in check["fix"]
    assert check["status"] == ("optional" if release == "20221219" else "ok")


@pytest.mark.skipif(shutil.which("runsc") is None, reason="needs runsc")
def test_release_of_runsc_is_read_from_the_real_program() -> None:
    assert re.search(r"runsc, release 20\d{6}\b", checks_by_name()["runsc"]["detail"])


def test_enforcement_of_disk_limits_is_reported(tmp_path: Path) -> None:
    home = {"SMOKEBOX_HOME": str(tmp_path)}
    check = checks_by_name(home)["disk limits"]
    if check["status"] == "optional":
        assert "measured" in check["detail"]
        (tmp_path / "pool.xfs").touch()
        check = checks_by_name(home)["disk limits"]
        assert check["detail"] == f"enforced in the storage pool {tmp_path}/pool.xfs"
    assert check["status"] == "ok"


def test_missing_requirement_exits_with_1() -> None:
    # With little address space, no thread can have the stack that scripts need.
    command = f"ulimit -v 1000000; exec {sys.executable} -m smokebox doctor"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "missing  thread stacks" in done.stdout
    assert "fix: ulimit -v unlimited" in done.stdout


def orphans(home: Path) -> dict[str, Check]:
    return {check.name: check for check in check_orphans(str(home))}


async def test_sandboxes_that_run_without_a_server_are_listed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert [one.status for one in orphans(home).values()] == ["ok"]
    assert not home.exists()
    host = await Host.open(home, pool=0)
    await host.sandbox("kept", keep_alive=True).wake()
    await host.sandbox("other", sleep_after="10m").wake()
    await host.sandbox("asleep", keep_alive=True).wake()
    await host.sandbox("asleep").sleep()
    assert find_orphans(str(home)) == []
    await host.aclose(detach=True)
    found = orphans(home)
    assert set(found) == {"sandbox kept", "sandbox other"}
    assert re.fullmatch(
        r"runs without a server, stays; started \d+s ago, [\d.]+ [KM]iB of memory",
        found["sandbox kept"].detail,
    )
    assert "ends 10m after it lost it" in found["sandbox other"].detail
    assert "smokebox sleep kept" in found["sandbox kept"].fix
    assert "smokebox up" in found["sandbox kept"].fix
    async with await Host.open(home, pool=0) as host:
        assert find_orphans(str(home)) == []
        assert [one.status for one in await host.list()] == ["idle", "active", "active"]
    assert find_orphans(str(home)) == []


async def test_record_of_a_later_version_is_no_failure(tmp_path: Path) -> None:
    await (await Host.open(tmp_path, pool=0)).aclose()
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection:
        connection.execute("PRAGMA user_version = 999")
    [check] = orphans(tmp_path).values()
    assert (check.status, "Upgrade Smokebox" in check.fix) == ("optional", True)
    assert "of version 999, from a later Smokebox" in check.detail


def test_record_that_cannot_be_read_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "record.db").write_text("not a database, and long enough to be taken for one")
    [check] = orphans(tmp_path).values()
    assert check.status == "optional"
    assert "not a database" in check.detail
