"""Attacks on the host's files through the file API: planted symlinks, swapped during calls."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import Canary, check_alive, for_seconds, run, running_inside
from smokebox.errors import (
    AccessDenied,
    FileTooLarge,
    LimitReached,
    PathNotFound,
    SmokeboxError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.sandbox import Sandbox

SECONDS = 0.5
# Swaps a directory and a symlink to a directory of the host, as fast as possible.
SWAP = """
os.makedirs("/workspace/tree", exist_ok=True)
os.chdir("/workspace/tree")
os.makedirs("spare", exist_ok=True)
write("spare/secret", "inside")
os.symlink(sys.argv[1], "d")
while True:
    syscall("renameat2", -100, b"spare", -100, b"d", 2)
    if not os.path.isdir("spare") and not os.path.isdir("d"):
        attempt(os.mkdir, "d")
"""


@pytest.fixture(params=["{folder}", "../../../../../../../../..{folder}", "/proc/1/root{folder}"])
def target(request: pytest.FixtureRequest, canary: Canary) -> str:
    """Return the target of a symlink to the directory of the host."""
    template: str = request.param
    return template.format(folder=canary.folder)


async def as_stream(data: bytes) -> AsyncIterator[bytes]:
    """Yield bytes as a stream."""
    yield data


def archive(*members: tuple[str, str, bytes]) -> bytes:
    """Return a tar archive of members, each a type, a name, and its content or target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind, name, content in members:
            info = tarfile.TarInfo(name)
            info.type = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}.get(
                kind, tarfile.REGTYPE
            )
            if kind == "file":
                info.size = len(content)
            else:
                info.linkname = content.decode()
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


async def test_file_calls_do_not_follow_symlinks_outside(
    sandbox: Sandbox, canary: Canary, target: str
) -> None:
    files = sandbox.files
    await files.symlink(target, "/workspace/d")
    await files.symlink(f"{target}/secret", "/workspace/f")
    contents = []
    for path in ("/workspace/d/secret", "/workspace/f", f"/proc/self/root{canary.secret}"):
        for call in (
            lambda path=path: files.read_file(path),
            lambda path=path: files.read_range(path, 0, 100),
            lambda path=path: files.append_file(path, "changed"),
            lambda path=path: files.chmod(path, 0o777),
            lambda path=path: files.chown(path, 1),
            lambda path=path: files.touch(path, mtime=1.0),
            lambda path=path: files.copy(path, "/workspace/copied"),
            lambda path=path: files.rename(path, "/workspace/stolen"),
            lambda path=path: files.write_file(path, "changed"),
            lambda path=path: files.rm(path),
            lambda path=path: files.rm("/workspace/d/", recursive=True),
        ):
            with contextlib.suppress(SmokeboxError):
                contents.append(await call())
    assert Canary.TEXT not in repr(contents)
    assert canary.unharmed


async def test_listings_and_archives_do_not_follow_symlinks(
    sandbox: Sandbox, canary: Canary, target: str
) -> None:
    files = sandbox.files
    await files.mkdir("/workspace/tree")
    await files.symlink(target, "/workspace/tree/d")
    assert await files.glob("/workspace/tree/**", hidden=True) == ["/workspace/tree/d"]
    assert await files.glob("/workspace/tree/d/*") == []
    assert len(await files.list_files("/workspace/tree", recursive=True)) == 1
    packed = b"".join([piece async for piece in files.download_tar("/workspace/tree")])
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert all(member.issym() or member.isdir() for member in tar)
    await files.rm("/workspace/tree", recursive=True)
    assert canary.unharmed


async def test_extracted_archive_stays_inside(
    sandbox: Sandbox, canary: Canary, target: str
) -> None:
    data = archive(
        ("link", "d", target.encode()),
        ("file", "d/secret", b"changed"),
        ("file", "d/more", b"changed"),
        ("hard", "h", canary.secret.encode()),
        ("hard", "g", b"d/secret"),
        ("file", "g", b"changed"),
        ("file", f"../../../../../..{canary.folder}/up", b"changed"),
        ("file", f"{canary.folder}/absolute", b"changed"),
    )
    with contextlib.suppress(SmokeboxError):
        await sandbox.files.upload_tar("/workspace/to", as_stream(data))
    for number in range(8):
        with contextlib.suppress(SmokeboxError):
            await sandbox.files.upload_tar("/workspace/to", as_stream(_without(data, number)))
    assert canary.unharmed


def _without(data: bytes, number: int) -> bytes:
    """Remove one member of an archive: a refused member must not protect the others."""
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as old,
        tarfile.open(fileobj=buffer, mode="w") as new,
    ):
        for at, member in enumerate(old):
            if at != number:
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()


async def test_reading_while_symlinks_are_swapped(sandbox: Sandbox, canary: Canary) -> None:
    contents: list[object] = []
    async with running_inside(sandbox, SWAP, str(canary.folder)):
        for _ in for_seconds(SECONDS):
            for path in ("/workspace/tree/d/secret", "/workspace/tree/spare/secret"):
                with contextlib.suppress(SmokeboxError):
                    contents.append(await sandbox.read_file(path))
            with contextlib.suppress(SmokeboxError):
                stream = sandbox.files.download_tar("/workspace/tree")
                contents.append(b"".join([piece async for piece in stream]))
            with contextlib.suppress(SmokeboxError):
                contents.append(await sandbox.glob("/workspace/tree/*/*"))
    assert "inside" in contents
    assert Canary.TEXT not in repr(contents)
    assert canary.unharmed


async def test_writing_while_symlinks_are_swapped(sandbox: Sandbox, canary: Canary) -> None:
    data = archive(("file", "d/secret", b"changed"), ("file", "d/more/below", b"changed"))
    async with running_inside(sandbox, SWAP, str(canary.folder)):
        for _ in for_seconds(SECONDS):
            for name in ("d", "spare"):
                for call in (
                    sandbox.write_file(f"/workspace/tree/{name}/secret", "inside"),
                    sandbox.files.append_file(f"/workspace/tree/{name}/secret", "x"),
                    sandbox.files.chmod(f"/workspace/tree/{name}/secret", 0o600),
                    sandbox.files.upload_tar("/workspace/tree", as_stream(data)),
                ):
                    with contextlib.suppress(SmokeboxError):
                        await call
    assert canary.unharmed


async def test_removing_and_copying_while_symlinks_are_swapped(
    sandbox: Sandbox, canary: Canary
) -> None:
    async with running_inside(sandbox, SWAP, str(canary.folder)):
        for _ in for_seconds(SECONDS):
            with contextlib.suppress(SmokeboxError):
                await sandbox.files.copy("/workspace/tree", "/workspace/copy", recursive=True)
            for path in ("/workspace/copy", "/workspace/tree/d", "/workspace/tree/spare"):
                with contextlib.suppress(SmokeboxError):
                    await sandbox.rm(path, recursive=True, force=True)
    found = await sandbox.exec("grep -rl own /workspace")
    assert found.stdout == ""
    assert canary.unharmed


async def test_watch_does_not_follow_symlinks(sandbox: Sandbox, canary: Canary) -> None:
    await sandbox.mkdir("/workspace/tree")
    await sandbox.files.symlink(str(canary.folder), "/workspace/tree/d")
    stream = await sandbox.files.watch("/workspace/tree", recursive=True)
    (canary.folder / "secret").write_text(Canary.TEXT)
    await sandbox.write_file("/workspace/tree/last", "")
    async for event in stream:
        assert "secret" not in repr(event)
        if "last" in repr(event):
            break
    await stream.aclose()


@pytest.mark.parametrize(
    "path", ["/proc/1/environ", "/proc/kcore", "/proc/sysrq-trigger", "/proc/self/mem", "/dev/zero"]
)
async def test_virtual_files_of_the_kernel_are_not_read(sandbox: Sandbox, path: str) -> None:
    """The engine has more rights to these than the sandbox, and /dev/zero is endless."""
    await sandbox.files.symlink(path, "/workspace/link")
    for name in (path, "/workspace/link"):
        with pytest.raises(SmokeboxError):
            await sandbox.read_bytes(name)
        if path != "/dev/zero":
            with pytest.raises(SmokeboxError):
                await sandbox.files.append_file(name, "changed")


async def test_pipe_does_not_block_a_call(sandbox: Sandbox, tier: str) -> None:
    await sandbox.exec("mkfifo /workspace/pipe; rm -f /etc/passwd /etc/group; mkfifo /etc/passwd")
    # A pipe of gVisor exists only inside: the file API finds no file.
    refused = pytest.raises if tier == "namespaces" else contextlib.suppress
    for call in (
        sandbox.read_file("/workspace/pipe"),
        sandbox.files.append_file("/workspace/pipe", "x"),
        sandbox.files.copy("/workspace/pipe", "/workspace/other"),
        sandbox.exec("id", user="nobody"),
    ):
        with refused(SmokeboxError):
            await call
    await check_alive(sandbox)


async def test_huge_file_is_not_read_into_memory(sandbox: Sandbox) -> None:
    await sandbox.exec("rm /etc/passwd; truncate -s 7G /workspace/huge /etc/passwd")
    with pytest.raises(FileTooLarge):
        await sandbox.read_bytes("/workspace/huge")
    with pytest.raises(SmokeboxError):
        await sandbox.exec("id", user="nobody")


async def test_growing_file_does_not_block_reader(sandbox: Sandbox) -> None:
    grow = """
file = open("/workspace/grows", "wb", 0)
while True:
    file.write(b"x" * (1 << 20))
    if file.output() > 100 << 20:
        file.truncate(0)
        file.seek(0)
"""
    async with asyncio.timeout(18), contextlib.AsyncExitStack() as stack:
        await sandbox.exec(["touch", "/workspace/grows"])
        await stack.enter_async_context(running_inside(sandbox, grow))
        for _ in for_seconds(SECONDS):
            with contextlib.suppress(SmokeboxError):
                await sandbox.read_bytes("/workspace/grows")
            with contextlib.suppress(SmokeboxError):
                async for _ in sandbox.files.download_tar("/workspace"):
                    pass
            with contextlib.suppress(SmokeboxError):
                await sandbox.files.copy("/workspace/grows", "/tmp/copy")
    await check_alive(sandbox)


async def test_listing_of_many_names_is_bounded(sandbox: Sandbox) -> None:
    result = await run(
        sandbox,
        """
os.mkdir("/workspace/many")
os.chdir("/workspace/many")
for number in range(5000):
    os.symlink("x", f"{number:0200}")
output("done")
""",
    )
    assert result == "done"
    with contextlib.suppress(LimitReached):
        assert len(await sandbox.readdir("/workspace/many")) == 5_000
    await sandbox.rm("/workspace/many", recursive=True)
    await check_alive(sandbox)


async def test_mount_points_cannot_be_moved_or_removed(sandbox: Sandbox, tier: str) -> None:
    """From outside, the kernel would allow removing a directory that is a mount point inside."""
    # The file API does not see virtual files of the gVisor kernel.
    refused = AccessDenied if tier == "namespaces" else (AccessDenied, PathNotFound)
    for path in ("/proc", "/proc/sys", "/proc/keys", "/dev/pts"):
        with pytest.raises(refused):
            await sandbox.files.rename(path, "/workspace/away")
        with pytest.raises(refused):
            await sandbox.rm(path, recursive=True)
    shown = await sandbox.exec("cat /proc/sys/kernel/hostname; echo /dev/pt?; cat /proc/keys")
    assert shown.stdout.split() == ["attacker", "/dev/pts"]
    assert (await sandbox.exec("echo x > /proc/sys/kernel/hostname")).exit_code != 0


@pytest.mark.parametrize("device", ["null", "zero", "full", "random", "urandom", "tty"])
async def test_devices_of_the_host_cannot_be_changed(sandbox: Sandbox, device: str) -> None:
    """They are bind mounts of the host's devices: a change would affect every process."""
    path = f"/dev/{device}"
    await sandbox.wake()
    before = os.stat(path)
    for call in (
        sandbox.files.chmod(path, 0o666),
        sandbox.files.chown(path, 0),
        sandbox.files.touch(path, mtime=before.st_mtime),
        sandbox.files.rm(path),
        sandbox.files.rename(path, "/workspace/device"),
        sandbox.files.upload_tar("/dev", as_stream(archive(("file", device, b"mine")))),
    ):
        with contextlib.suppress(SmokeboxError):
            await call
    after = os.stat(path)
    assert (after.st_ino, after.st_mode, after.st_uid) == (
        before.st_ino,
        before.st_mode,
        before.st_uid,
    )
    assert after.st_ctime_ns == before.st_ctime_ns
