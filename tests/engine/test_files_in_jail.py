"""Files of a real jail, whose root is an overlay in a user namespace."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING, NamedTuple

import pytest
import pytest_asyncio

from smokebox.engine.files.descriptors import closing
from smokebox.engine.files.files import Files
from smokebox.engine.files.trees import remove_tree
from smokebox.engine.images.image import Layer
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.jail.spec import JailSpec
from smokebox.engine.workers import Workers
from smokebox.errors import AccessDenied, IsolationUnavailable, PathError, SymlinkLoop
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.host import Host
    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.jail.spec import Owner


class Inside(NamedTuple):
    jail: Jail
    files: Files


@pytest_asyncio.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Inside]:
    """Start a jail with a small image."""
    for name in ("proc", "dev", "sys", "tmp", "run", "etc", "usr", "workspace", "image/sub"):
        (tmp_path / "image" / name).mkdir(parents=True)
    (tmp_path / "image/image/sub/file").write_text("of the image")
    jailer = NamespaceJailer()
    layers = (Layer(path=f"{tmp_path}/image"), Layer(path="/usr", target="/usr"))
    spec = JailSpec(
        key=f"files-{secrets.token_hex(4)}",
        directory=f"{tmp_path}/box",
        layers=layers,
        limits=Limits(),
    )
    try:
        jail = await jailer.make(spec)
    except IsolationUnavailable as error:
        pytest.skip(f"no jail here: {error}")
    workers = Workers()

    async def root() -> tuple[int, Owner]:
        return jail.root, jail.owner

    files = Files(root, workers=workers)
    try:
        await jail.enter("box", Limits())
        yield Inside(jail, files)
    finally:
        await files.release()
        workers.close()
        await jail.kill()
        jail.close()
        await jailer.aclose()
        with closing(os.open(tmp_path, os.O_PATH)) as parent:
            remove_tree(parent, "box", spec.directory)


async def test_new_files_belong_to_root_inside(inside: Inside) -> None:
    await inside.files.write_file("a/b", "content")
    fd = os.open(f"/proc/self/fd/{inside.jail.root}/workspace/a/b", os.O_PATH)
    found = os.fstat(fd)
    os.close(fd)
    assert (found.st_uid, found.st_gid) == (inside.jail.owner.uid, inside.jail.owner.gid)
    assert await inside.files.read_file("a/b") == "content"


async def test_directory_of_the_image_can_be_renamed(inside: Inside) -> None:
    await inside.files.append_file("/image/sub/file", ", changed")
    await inside.files.rename("/image", "/moved")
    assert await inside.files.read_file("/moved/sub/file") == "of the image, changed"
    await inside.files.rm("/moved", recursive=True)
    assert not {"image", "moved"} & set(await inside.files.readdir("/"))


async def test_tar_round_trip(inside: Inside) -> None:
    await inside.files.symlink("/etc/anything", "/image/link")
    stream = inside.files.download_tar("/image")
    await inside.files.upload_tar("/copy", stream)
    listed = await inside.files.list_files("/copy", recursive=True)
    assert [info.path for info in listed] == ["/copy/link", "/copy/sub", "/copy/sub/file"]


async def test_watch_reports_changes_in_both_layers(inside: Inside) -> None:
    async with await inside.files.watch("/image") as stream, asyncio.timeout(10):
        await inside.files.append_file("/image/sub/file", "more")
        assert (await anext(stream)).path == "/image/sub/file"
        await inside.files.write_file("/image/new/file", "")
        while (await anext(stream)).path != "/image/new/file":
            pass


@pytest.mark.parametrize(
    "path",
    [
        "/proc/1/environ",
        "/proc/1/root/etc/passwd",
        "/proc/1/exe",
        "/proc/sys/kernel/core_pattern",
        "/proc/kmsg",
        "/proc/self/root/etc/passwd",
        "/dev/zero",
        "/dev/tty",
    ],
)
async def test_kernel_files_and_devices_are_not_read(inside: Inside, path: str) -> None:
    with pytest.raises(PathError):
        await inside.files.read_bytes(path)


async def test_kernel_files_are_not_written(inside: Inside) -> None:
    for path in ("/proc/sys/kernel/domainname", "/run/smokebox/x"):
        with pytest.raises((AccessDenied, SymlinkLoop)):
            await inside.files.write_file(path, "x")
        with pytest.raises((AccessDenied, SymlinkLoop)):
            await inside.files.append_file(path, "x")
    await inside.files.write_file("/dev/null", "gone")
    assert (await inside.files.stat("/dev/null")).type == "other"


async def test_mount_points_cannot_be_removed_or_moved(host: Host) -> None:
    """Removing a mount point from outside would unmount it in the sandbox."""
    sandbox = host.sandbox("mounts")
    for path in ("/dev", "/proc", "/usr", "/run/smokebox"):
        with pytest.raises(AccessDenied, match="mount point of the sandbox"):
            await sandbox.rm(path, recursive=True)
        with pytest.raises(AccessDenied, match="mount point of the sandbox"):
            await sandbox.files.rename(path, "/workspace/stolen")
    assert (await sandbox.exec("echo x > /dev/null && ls /usr/bin/env")).success
