"""Attempts to get at the credentials of a mounted bucket, out of it, or at who serves it."""

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

from attack.inside import alive, run
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
def request_to_mount(seaweed: SeaweedServer, bucket_name: str) -> MountRequest:
    """A folder of a bucket at /a/data."""
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
def store(request_to_mount: MountRequest) -> Store:
    """The whole bucket, as its owner sees it."""
    return Store.of(request_to_mount.bucket, request_to_mount.access)


@pytest_asyncio.fixture
async def mounted(
    kernel_of_the_host: None, sandbox: Sandbox, request_to_mount: MountRequest
) -> Sandbox:
    """Where the attacker is root, with that."""
    await sandbox.mounts.mount(request_to_mount)
    return sandbox


async def test_the_credentials_are_nowhere_inside(mounted: Sandbox) -> None:
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
tell(found)
"""
    assert await run(mounted, code) == []


async def test_who_serves_it_is_not_to_be_seen(mounted: Sandbox) -> None:
    served = mounted.mounts._daemons["/a/data"].pid
    code = """
names = []
for pid in pids():
    try:
        names.append(read(f"/proc/{pid}/comm").strip())
    except OSError:
        pass
tell(["smokebox-mount" in names, attempt(os.kill, int(sys.argv[1]), 9)])
"""
    assert await run(mounted, code, str(served)) == [False, "ESRCH"]
    os.kill(served, 0)


async def test_who_serves_it_has_no_rights_worth_having(mounted: Sandbox) -> None:
    served = mounted.mounts._daemons["/a/data"].pid
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{served}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) == 0
    if os.geteuid() == 0:
        assert "0" not in status["Uid"].split()
        assert status["Groups"].strip() == ""
        assert SECRET.encode() not in Path(f"/proc/{served}/environ").read_bytes()
    assert SECRET.encode() not in Path(f"/proc/{served}/cmdline").read_bytes()


async def test_nothing_is_mounted_or_unmounted_from_inside(mounted: Sandbox) -> None:
    code = """
umount = attempt(lambda: libc.umount2(b"/a/data", 2) and (_ for _ in ()).throw(
    OSError(ctypes.get_errno(), "")))
tell([
    umount,
    attempt(os.open, "/dev/fuse", os.O_RDWR),
    attempt(os.rename, "/a/data", "/elsewhere"),
    attempt(os.rmdir, "/a/data"),
])
"""
    assert await run(mounted, code) == ["EPERM", "ENOENT", "EBUSY", "EBUSY"]


async def test_a_folder_of_a_bucket_is_all_there_is(mounted: Sandbox, store: Store) -> None:
    store["theirs/secret"] = b"theirs"
    store["mine/x"] = b"mine"
    code = """
tell([
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


async def test_a_moved_way_leads_no_unmount_astray(mounted: Sandbox) -> None:
    """What the engine unmounts is what it mounted, and never what a symlink leads to."""
    before = (await mounted.exec("cat /proc/mounts")).stdout
    await mounted.exec("mv /a /b && ln -s /proc /a; mkdir -p /c")
    for force in (False, True):
        with contextlib.suppress(SmokeboxError):
            await mounted.mounts.unmount("/a/data", force=force)
    after = (await mounted.exec("cat /proc/mounts")).stdout
    assert [line for line in before.splitlines() if "/data" not in line] == [
        line for line in after.splitlines() if "/data" not in line
    ]
    await alive(mounted)


async def test_a_symlink_is_no_place_to_mount(
    kernel_of_the_host: None, sandbox: Sandbox, request_to_mount: MountRequest
) -> None:
    await sandbox.exec("ln -s /proc /a")
    with pytest.raises(SmokeboxError):
        await sandbox.mounts.mount(replace(request_to_mount, path="/a/sys"))
    assert "bucket" not in (await sandbox.exec("cat /proc/mounts")).stdout


async def test_no_setuid_program_and_no_device_of_a_bucket_works(mounted: Sandbox) -> None:
    code = """
import shutil
shutil.copy("/usr/bin/id", "/a/data/id")
os.chmod("/a/data/id", 0o4755)
flags = next(line for line in open("/proc/mounts") if " /a/data " in line).split()[3].split(",")
tell(["nosuid" in flags, "nodev" in flags])
"""
    assert await run(mounted, code) == [True, True]


async def test_many_who_read_and_write_at_once_hold_up_nobody(mounted: Sandbox) -> None:
    code = """
import threading
def work(number):
    for turn in range(5):
        write(f"/a/data/{number}", "x" * 10000 * turn)
        read(f"/a/data/{number}")
        os.listdir("/a/data")
threads = [threading.Thread(target=work, args=(n,)) for n in range(64)]
for one in threads: one.start()
for one in threads: one.join()
tell(len(os.listdir("/a/data")))
"""
    assert await run(mounted, code) == 64
    await alive(mounted)


async def test_what_it_holds_in_memory_is_bounded(mounted: Sandbox, store: Store) -> None:
    for number in range(12):
        store[f"mine/large-{number}"] = bytes(16 << 20)
    code = """
files = [open(f"/a/data/large-{n}", "rb", buffering=0) for n in range(12)]
tell(sum(len(file.read(1 << 20)) for _ in range(16) for file in files))
"""
    assert await run(mounted, code) == 12 * 16 << 20
    served = mounted.mounts._daemons["/a/data"].pid
    status = Path(f"/proc/{served}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 270_000


@contextlib.contextmanager
def redirecting(to: str) -> Iterator[str]:
    """A server that sends whoever asks elsewhere."""
    answer = f"HTTP/1.1 307 T\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


async def test_a_store_cannot_send_the_host_to_its_own_network(
    kernel_of_the_host: None, sandbox: Sandbox, request_to_mount: MountRequest
) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        writer.close()

    inside = await asyncio.start_server(hear, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{inside.sockets[0].getsockname()[1]}/latest/meta-data"
    async with inside:
        for endpoint in (address, address.replace("127.0.0.1", "localhost")):
            request = replace(
                request_to_mount,
                private=False,
                access=replace(request_to_mount.access, endpoint=endpoint),
            )
            with pytest.raises(SmokeboxError, match="public address"):
                await sandbox.mounts.mount(request)
        with await loop.run_in_executor(None, lambda: redirecting(address)) as first:
            request = replace(
                request_to_mount, access=replace(request_to_mount.access, endpoint=first)
            )
            # A private store may be asked, and still leads nowhere but to itself.
            with pytest.raises(SmokeboxError):
                await sandbox.mounts.mount(replace(request, private=False))
    assert not asked.is_set()


async def test_gvisor_has_none_and_says_so(
    sandbox: Sandbox, request_to_mount: MountRequest, tier: str
) -> None:
    if tier != "gvisor":
        await sandbox.mounts.mount(request_to_mount)
        return
    with pytest.raises(Unsupported, match="gvisor"):
        await sandbox.mounts.mount(request_to_mount)
