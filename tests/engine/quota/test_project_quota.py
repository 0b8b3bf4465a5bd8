"""Disk limits that the kernel enforces, where the state directory has project quotas."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from quota_file_systems import open_host
from smokebox.cli.doctor import _disk_limits
from smokebox.engine.host import Host
from smokebox.engine.quota import kernel, projects
from smokebox.engine.quota.projects import BYTES_PER_INODE, PIPES_BYTES, ProjectQuotas
from smokebox.errors import LimitReached
from smokebox.limits import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox

LIMIT = 32 * MIB
FILL = "i=0; while head -c 4m /dev/zero > fill$i; do i=$((i+1)); done; echo stopped at $i"


async def create(host: Host, id: str = "box", **options: object) -> Sandbox:
    limits = {"disk": LIMIT}
    return await host.create(id, image="dir:small", limits=limits, **options)  # type: ignore[arg-type]


async def used(sandbox: Sandbox) -> int:
    return (await sandbox.stats()).disk or 0


async def check_unused(disk: Path, project: int) -> None:
    """Wait until no file and no limit is left: XFS frees removed files a little later."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        async with asyncio.timeout(10):
            while {kernel.get_quota(fd, project + n) for n in (0, 1)} != {kernel.Quota()}:
                os.statvfs(fd)
                await asyncio.sleep(0.05)
    finally:
        os.close(fd)


@pytest.mark.parametrize("disk", ["xfs", "ext4"], indirect=True)
async def test_program_gets_an_error_at_the_limit_and_its_sandbox_runs_on(host: Host) -> None:
    sandbox, neighbour = await create(host), await create(host, "neighbour")
    result = await sandbox.exec(FILL, timeout=15)
    assert result.stderr
    assert 7 <= int(result.stdout.split()[-1]) <= 8
    assert LIMIT - MIB <= await used(sandbox) <= LIMIT
    # Longer than the checks of the engine are apart.
    await asyncio.sleep(1.2)
    info = await sandbox.info()
    assert info is not None
    assert (info.generation, info.disk_enforcement) == (1, "quota")
    assert (await sandbox.exec("rm fill*; head -c 8m /dev/zero > again")).success
    assert (await neighbour.exec("head -c 16m /dev/zero > mine")).success


async def test_deleted_open_file_counts_until_it_is_closed(host: Host) -> None:
    sandbox = await create(host)
    code = "exec 3>held; rm held; head -c 20m /dev/zero >&3; head -c 20m /dev/zero > more"
    result = await sandbox.exec(f"{code}; ls -l /proc/$$/fd/3; sleep 0")
    assert "head:" in result.stderr
    assert await used(sandbox) <= LIMIT
    await sandbox.exec("rm more")
    async with asyncio.timeout(10):
        # XFS frees removed files a little later.
        while await used(sandbox) > MIB:
            await asyncio.sleep(0.1)


async def test_limit_of_a_running_sandbox_changes_at_once(host: Host) -> None:
    sandbox = await create(host)
    await sandbox.exec("head -c 24m /dev/zero > first")
    host.sandbox("box", limits={"disk": 64 * MIB})
    assert (await sandbox.exec("head -c 24m /dev/zero > second")).success
    host.sandbox("box", limits={"disk": LIMIT})
    assert not (await sandbox.exec("head -c 1m /dev/zero > third")).success
    assert (await sandbox.exec("rm second third; head -c 4m /dev/zero > fourth")).success


async def test_api_refuses_what_would_pass_the_limit(host: Host) -> None:
    sandbox = await create(host)
    await sandbox.exec("head -c 24m /dev/zero > first")
    with pytest.raises(LimitReached) as caught:
        await sandbox.write_file("more", bytes(16 * MIB))
    assert caught.value.fields == {"limit": "disk"}
    assert await sandbox.readdir("/workspace") == ["first"]


async def test_full_sandbox_sleeps_and_wakes_and_still_cannot_grow(host: Host) -> None:
    sandbox = await create(host)
    await sandbox.exec(f"{FILL}; while echo x >> rest; do :; done", timeout=15)
    await sandbox.sleep()
    result = await sandbox.exec("head -c 1m /dev/zero > more")
    assert not result.success
    assert await used(sandbox) <= LIMIT + MIB
    assert (await sandbox.exec("rm fill1; head -c 2m /dev/zero > more")).success
    info = await sandbox.info()
    assert info is not None
    assert info.generation == 2


async def test_number_of_files_is_limited(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projects, "FEWEST_INODES", 500)
    sandbox = await create(host)
    count = LIMIT // BYTES_PER_INODE
    code = "i=0; while echo > $i; do i=$((i+1)); done 2>&-; echo $i"
    result = await sandbox.exec(code, timeout=19)
    assert count - 100 <= int(result.stdout.split()[-1]) < count
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_log_of_a_background_process_counts(host: Host) -> None:
    sandbox = await create(host)
    process = await sandbox.start_process("head -c 48m /dev/zero")
    await process.wait_for_exit(timeout=15)
    assert LIMIT // 2 < await used(sandbox) <= LIMIT
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_destroy_leaves_no_limit_and_no_use(host: Host, disk: Path) -> None:
    sandbox = await create(host)
    await sandbox.exec("head -c 4m /dev/zero > file")
    [directory] = (disk / "home" / "boxes").iterdir()
    quotas = ProjectQuotas.detect(str(disk))
    assert quotas is not None
    state = quotas.state(str(directory))
    assert state is not None
    assert state.quota.byte_limit == LIMIT
    await sandbox.destroy()
    await check_unused(disk, state.project)


@pytest.mark.parametrize("disk", ["xfs", "ext4"], indirect=True)
async def test_pipes_have_a_project_of_their_own(host: Host, disk: Path) -> None:
    await create(host)
    [directory] = (disk / "home" / "boxes").iterdir()
    projects = {}
    for path in ("", "data", "data/upper/0", "data/work/0", "run", "run/io", "run/io/output"):
        fd = os.open(directory / path, os.O_RDONLY)
        projects[path] = kernel.get_project(fd)
        if path == "run/io":
            assert kernel.get_quota(fd, projects[path]).byte_limit == PIPES_BYTES
        os.close(fd)
    project = projects[""]
    assert projects.pop("run/io") == project + 1
    assert set(projects.values()) == {project}


async def test_limit_outlives_the_engine(disk: Path, image: Path) -> None:
    host = await Host.open(
        disk / "home", pool=0, images=disk / "layers", directories={"small": str(image)}
    )
    sandbox = await create(host)
    await sandbox.start_process("sleep 99")
    await host.aclose(detach=True)
    async with open_host(disk / "home", image) as host:
        sandbox = host.sandbox("box")
        assert "stopped at 7" in (await sandbox.exec(FILL, timeout=15)).stdout
        info = await sandbox.info()
        assert info is not None
        assert (info.generation, info.disk_enforcement) == (1, "quota")
        assert await used(sandbox) <= LIMIT
        await sandbox.destroy()


async def test_sandboxes_of_a_burst_have_different_projects(host: Host, disk: Path) -> None:
    await asyncio.gather(*(create(host, f"box-{number}") for number in range(8)))
    projects = set()
    for directory in (disk / "home" / "boxes").iterdir():
        fd = os.open(directory, os.O_RDONLY)
        projects.add(kernel.get_project(fd))
        os.close(fd)
    assert len(projects) == 8


async def test_interrupted_creation_is_removed_with_its_limit(disk: Path, image: Path) -> None:
    """A kill between the directory and the record leaves a directory that no sandbox has."""
    async with open_host(disk / "home", image) as host:
        tag = host._context.tag
        host._context.storage.prepare(f"{tag}-stray", LIMIT)
        state = host._context.storage.quota(f"{tag}-stray")
    assert state is not None
    async with open_host(disk / "home", image):
        assert os.listdir(disk / "home" / "boxes") == []
    await check_unused(disk, state.project)


async def test_sandbox_without_a_limit_is_only_counted(host: Host) -> None:
    sandbox = await host.create("free", image="dir:small", limits={"disk": None})
    assert (await sandbox.exec("head -c 100m /dev/zero > file")).success
    assert await used(sandbox) > 100 * 10**6


async def test_doctor_finds_the_quotas(
    host: Host, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOKEBOX_HOME", str(disk / "not-yet"))
    check = _disk_limits()
    assert (check.status, check.detail) == ("ok", f"enforced by project quotas of {disk}")
