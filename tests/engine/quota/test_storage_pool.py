"""The storage pool: sandboxes in a file with a file system that has project quotas."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from quota_file_systems import make_file_system, make_image, open_host, unmount
from smokebox.engine.quota import loop_device
from smokebox.engine.quota.storage_pool import SMALLEST, open_pool, parse_pool_size
from smokebox.errors import Conflict, InvalidOption, IsolationUnavailable
from smokebox.limits import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

LIMIT = 16 * MIB
FILL = "i=0; while head -c 4m /dev/zero > fill$i; do i=$((i+1)); done; echo stopped at $i"


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system without quotas, where a pool can be mounted."""
    path = make_file_system(tmp_path, "plain")
    try:
        pool = open_pool(str(path), SMALLEST)
    except IsolationUnavailable as error:
        unmount(path)
        pytest.skip(f"no storage pool: {error.message}")
    assert pool is not None
    pool.close()
    (path / "pool.xfs").unlink()
    make_image(path / "image")
    yield path
    unmount(path)


async def create(host: Host, id: str = "box") -> Sandbox:
    return await host.create(id, image="dir:small", limits={"disk": LIMIT})


async def enforcement(sandbox: Sandbox) -> str | None:
    info = await sandbox.info()
    assert info is not None
    return info.disk_enforcement


async def check_limit(sandbox: Sandbox) -> None:
    """Fill a sandbox, which must not pass its limit, and make room again."""
    assert "stopped at 3" in (await sandbox.exec(FILL, timeout=30)).stdout
    assert ((await sandbox.stats()).disk or 0) <= LIMIT
    assert (await sandbox.exec("rm fill*")).success


async def test_pool_limits_sandboxes_and_is_unmounted_at_the_end(plain: Path) -> None:
    home = plain / "home"
    async with open_host(home, plain / "image", storage_pool="512MiB") as host:
        sandbox = await create(host)
        assert await enforcement(sandbox) == "pool"
        await check_limit(sandbox)
        await sandbox.write_file("kept", "text")
        assert os.path.ismount(home / "pool")
        # It is sparse.
        assert (home / "pool.xfs").stat().st_blocks * 512 < 256 * MIB
    assert not os.path.ismount(home / "pool")
    assert loop_device.find(str(home / "pool.xfs")) is None
    async with open_host(home, plain / "image", storage_pool="512MiB") as host:
        assert await host.sandbox("box").read_file("kept") == "text"
        await check_limit(host.sandbox("box"))


async def test_sandboxes_stay_where_they_were_created(plain: Path) -> None:
    home, image = plain / "home", plain / "image"
    async with open_host(home, image) as host:
        await (await create(host, "before")).write_file("file", "before")
    async with open_host(home, image, storage_pool="512MiB") as host:
        await (await create(host, "pooled")).write_file("file", "pooled")
        assert await host.sandbox("before").read_file("file") == "before"
        assert await enforcement(host.sandbox("before")) == "measured"
    async with open_host(home, image) as host:
        assert await host.sandbox("pooled").read_file("file") == "pooled"
        found = {info.id: info.disk_enforcement for info in await host.list()}
        assert found == {"before": "measured", "pooled": "pool"}
        assert await enforcement(await create(host, "after")) == "measured"


async def test_pool_grows_and_does_not_shrink(plain: Path) -> None:
    home, image = plain / "home", plain / "image"
    async with open_host(home, image, storage_pool="512MiB") as host:
        await create(host)
    async with open_host(home, image, storage_pool="768MiB"):
        space = os.statvfs(home / "pool")
        assert space.f_blocks * space.f_frsize > 600 * MIB
    with pytest.raises(InvalidOption, match="cannot shrink"):
        async with open_host(home, image, storage_pool="512MiB"):
            pass
    assert not os.path.ismount(home / "pool")


_ENGINE = """
    import asyncio, sys
    sys.path.insert(0, "tests")
    from pathlib import Path
    from quota_file_systems import open_host

    async def main():
        home, image = map(Path, sys.argv[1:])
        async with open_host(home, image, storage_pool="512MiB") as host:
            limits = {"disk": %d}
            sandbox = await host.create("box", image="dir:small", limits=limits)
            await sandbox.write_file("kept", "text")
            await sandbox.start_process("sleep 99")
            print("ready", flush=True)
            await asyncio.sleep(99)

    asyncio.run(main())
"""


async def test_killed_engine_leaves_a_pool_that_the_next_one_adopts(plain: Path) -> None:
    home, image = plain / "home", plain / "image"
    command = [sys.executable, "-c", textwrap.dedent(_ENGINE % LIMIT), str(home), str(image)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    assert await asyncio.to_thread(engine.stdout.readline) == b"ready\n"
    with pytest.raises(Conflict):
        async with open_host(home, image, storage_pool="512MiB"):
            pass
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    engine.stdout.close()
    async with open_host(home, image, storage_pool="512MiB") as host:
        sandbox = host.sandbox("box")
        info = await sandbox.info()
        assert info is not None
        assert (info.status, info.generation, info.disk_enforcement) == ("active", 1, "pool")
        assert await sandbox.read_file("kept") == "text"
        await check_limit(sandbox)
        await sandbox.destroy()
        assert os.listdir(home / "pool" / "boxes") == []
    assert not os.path.ismount(home / "pool")


async def test_pool_without_its_mount_is_mounted_with_the_same_device(plain: Path) -> None:
    """As after the end of a service with its own mounts, while its sandboxes run on."""
    home, image = plain / "home", plain / "image"
    command = [sys.executable, "-c", textwrap.dedent(_ENGINE % LIMIT), str(home), str(image)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    assert await asyncio.to_thread(engine.stdout.readline) == b"ready\n"
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    engine.stdout.close()
    device = loop_device.find(str(home / "pool.xfs"))
    subprocess.run(["umount", "-l", home / "pool"], check=True)
    async with open_host(home, image, storage_pool="512MiB") as host:
        assert loop_device.find(str(home / "pool.xfs")) == device
        assert await host.sandbox("box").read_file("kept") == "text"
        await check_limit(host.sandbox("box"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets as far as the mount")
async def test_refused_pool_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a kernel without quotas of XFS; on others the pool is there, and closed."""
    try:
        pool = await asyncio.to_thread(open_pool, str(tmp_path), SMALLEST)
    except IsolationUnavailable as error:
        assert "quotas" in error.hint or "xfsprogs" in error.hint or "loop" in error.hint
        assert os.listdir(tmp_path) == []
    else:
        assert pool is not None
        pool.close()
    assert not os.path.ismount(tmp_path / "pool")
    assert loop_device.find(str(tmp_path / "pool.xfs")) is None


async def test_missing_program_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.quota.storage_pool._PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(IsolationUnavailable, match=r"needs mkfs\.xfs") as caught:
        open_pool(str(tmp_path), SMALLEST)
    assert "apt-get install xfsprogs" in caught.value.hint
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", ["100MiB", "much", 0, True, None])
def test_invalid_size_is_refused(value: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_pool_size(value)
    assert caught.value.fields["option"] == "storage_pool"


def test_size_is_in_whole_blocks() -> None:
    assert parse_pool_size("1GB") == 1_000_000_000 // 4096 * 4096
