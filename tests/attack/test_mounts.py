"""Attacks on the credentials of a mounted bucket, its other objects, and its mount daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from attack.sandbox_code import check_alive, run
from engine.mounts.store import Store
from smokebox.engine.mounts.request import MountRequest, parse_request
from smokebox.errors import SmokeboxError, Unsupported
from smokebox.sandbox.access import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.sandbox import Sandbox
    from smokebox.testing import SeaweedServer

SECRET = "smokebox-secret"


@pytest.fixture
def mount_request(seaweed: SeaweedServer, bucket_name: str) -> MountRequest:
    """Return the request to mount a folder of a bucket at /a/data."""
    access = Access(
        endpoint=seaweed.endpoint,
        region=seaweed.region,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
    )
    assert access.secret_key == SECRET
    return parse_request(
        bucket_name, "/a/data", cwd="/", prefix="mine", access=access, private=True
    )


@pytest.fixture
def store(mount_request: MountRequest) -> Store:
    """Open the whole bucket, as its owner."""
    return Store.of(mount_request.bucket, mount_request.access)


@pytest_asyncio.fixture
async def mounted(host_kernel: None, sandbox: Sandbox, mount_request: MountRequest) -> Sandbox:
    """Return the sandbox of the attacker with the mounted bucket."""
    await sandbox.mounts.mount(mount_request)
    return sandbox


async def test_credentials_are_nowhere_inside(mounted: Sandbox) -> None:
    code = """
secret = "-".join(["smokebox", "secret"]).encode()
found = []
for folder in ("/proc", "/a", "/run", "/etc", "/tmp", "/root", "/workspace", "/var"):
    for above, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if one not in ("fdinfo", "task", "map_files")]
        for path in (os.path.join(above, name) for name in files):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                found += [path] * (secret in os.read(fd, 1 << 20))
                os.close(fd)
            except OSError:
                pass
output(found)
"""
    assert await run(mounted, code) == []


async def test_mount_daemon_is_invisible_inside(mounted: Sandbox) -> None:
    daemon = mounted.mounts._daemons["/a/data"].pid
    code = """
names = []
for pid in pids():
    try:
        names.append(read(f"/proc/{pid}/comm").strip())
    except OSError:
        pass
output(["smokebox-mount" in names, attempt(os.kill, int(sys.argv[1]), 9)])
"""
    assert await run(mounted, code, str(daemon)) == [False, "ESRCH"]
    os.kill(daemon, 0)


async def test_mount_daemon_is_unprivileged(mounted: Sandbox) -> None:
    daemon = mounted.mounts._daemons["/a/data"].pid
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{daemon}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) == 0
    if os.geteuid() == 0:
        assert "0" not in status["Uid"].split()
        assert status["Groups"].strip() == ""
        assert SECRET.encode() not in Path(f"/proc/{daemon}/environ").read_bytes()
    assert SECRET.encode() not in Path(f"/proc/{daemon}/cmdline").read_bytes()


async def test_mounts_cannot_be_changed_from_inside(mounted: Sandbox) -> None:
    code = """
umount = attempt(lambda: libc.umount2(b"/a/data", 2) and (_ for _ in ()).throw(
    OSError(ctypes.get_errno(), "")))
output([
    umount,
    attempt(os.open, "/dev/fuse", os.O_RDWR),
    attempt(os.rename, "/a/data", "/other"),
    attempt(os.rmdir, "/a/data"),
])
"""
    assert await run(mounted, code) == ["EPERM", "ENOENT", "EBUSY", "EBUSY"]


async def test_only_the_mounted_folder_is_accessible(mounted: Sandbox, store: Store) -> None:
    store["theirs/secret"] = b"theirs"
    store["mine/x"] = b"mine"
    code = """
output([
    sorted(os.listdir("/a/data")),
    attempt(open, "/a/data/../theirs/secret"),
    attempt(open, "/a/data/%2e%2e/theirs/secret"),
    attempt(open, "/a/data/..%2ftheirs%2fsecret"),
    attempt(open, "/a/data/\\\\..\\\\theirs", "w"),
    attempt(os.rename, "/a/data/x", "/a/data/\\\\..\\\\..\\\\theirs\\\\x"),
])
"""
    assert await run(mounted, code) == [["x"], "ENOENT", "ENOENT", "ENOENT", "EINVAL", "EINVAL"]
    assert store.keys() == ["mine/x", "theirs/secret"]


async def test_unmount_does_not_follow_a_moved_path(mounted: Sandbox) -> None:
    """The engine unmounts what it mounted, not the target of a symlink."""
    before = (await mounted.exec("cat /proc/mounts")).stdout
    await mounted.exec("mv /a /b && ln -s /proc /a; mkdir -p /c")
    for force in (False, True):
        with contextlib.suppress(SmokeboxError):
            await mounted.mounts.unmount("/a/data", force=force)
    after = (await mounted.exec("cat /proc/mounts")).stdout
    assert [line for line in before.splitlines() if "/data" not in line] == [
        line for line in after.splitlines() if "/data" not in line
    ]
    await check_alive(mounted)


async def test_symlink_is_refused_as_mount_point(
    host_kernel: None, sandbox: Sandbox, mount_request: MountRequest
) -> None:
    await sandbox.exec("ln -s /proc /a")
    with pytest.raises(SmokeboxError):
        await sandbox.mounts.mount(replace(mount_request, path="/a/sys"))
    assert "bucket" not in (await sandbox.exec("cat /proc/mounts")).stdout


async def test_bucket_is_mounted_without_setuid_and_devices(mounted: Sandbox) -> None:
    code = """
import shutil
shutil.copy("/usr/bin/id", "/a/data/id")
os.chmod("/a/data/id", 0o4755)
flags = next(line for line in open("/proc/mounts") if " /a/data " in line).split()[3].split(",")
output(["nosuid" in flags, "nodev" in flags])
"""
    assert await run(mounted, code) == [True, True]


async def test_many_concurrent_readers_and_writers(mounted: Sandbox) -> None:
    code = """
import threading
def use(number):
    for turn in range(5):
        write(f"/a/data/{number}", "x" * 10000 * turn)
        read(f"/a/data/{number}")
        os.listdir("/a/data")
threads = [threading.Thread(target=use, args=(n,)) for n in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
output(len(os.listdir("/a/data")))
"""
    assert await run(mounted, code) == 64
    await check_alive(mounted)


async def test_memory_of_mount_daemon_is_bounded(mounted: Sandbox, store: Store) -> None:
    for number in range(12):
        store[f"mine/large-{number}"] = bytes(16 << 20)
    code = """
files = [open(f"/a/data/large-{n}", "rb", buffering=0) for n in range(12)]
output(sum(len(file.read(1 << 20)) for _ in range(16) for file in files))
"""
    assert await run(mounted, code) == 12 * 16 << 20
    daemon = mounted.mounts._daemons["/a/data"].pid
    status = Path(f"/proc/{daemon}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 270_000


@contextlib.contextmanager
def redirecting(to: str) -> Iterator[str]:
    """Run a server that redirects every request."""
    response = f"HTTP/1.1 307 T\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


async def test_store_cannot_redirect_to_private_network(
    host_kernel: None, sandbox: Sandbox, mount_request: MountRequest
) -> None:
    requested = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.set()
        writer.close()

    private = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{private.sockets[0].getsockname()[1]}/latest/meta-data"
    async with private:
        for endpoint in (address, address.replace("127.0.0.1", "localhost")):
            request = replace(
                mount_request,
                private=False,
                access=replace(mount_request.access, endpoint=endpoint),
            )
            with pytest.raises(SmokeboxError, match="public address"):
                await sandbox.mounts.mount(request)
        with await loop.run_in_executor(None, lambda: redirecting(address)) as first:
            request = replace(mount_request, access=replace(mount_request.access, endpoint=first))
            # Also from a store whose private address is allowed.
            with pytest.raises(SmokeboxError):
                await sandbox.mounts.mount(replace(request, private=False))
    assert not requested.is_set()


async def test_mounts_are_unsupported_in_gvisor(
    sandbox: Sandbox, mount_request: MountRequest, tier: str
) -> None:
    if tier != "gvisor":
        await sandbox.mounts.mount(mount_request)
        return
    with pytest.raises(Unsupported, match="gvisor"):
        await sandbox.mounts.mount(mount_request)
