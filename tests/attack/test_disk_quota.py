"""Attempts to pass a disk limit that the kernel enforces, by root inside a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from attack.sandbox_code import PRELUDE
from quota_file_systems import add_python, make_file_system, make_image, open_host, unmount
from smokebox.engine.quota.projects import PIPES_BYTES
from smokebox.limits import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

LIMIT = 24 * MIB

_CODE = r"""
import fcntl, mmap
MIB = 1 << 20

def fill(fd, count=64):
    "Write until the first error, and return its name."
    for _ in range(count):
        try:
            os.write(fd, bytes(MIB))
        except OSError as error:
            return errno.errorcode[error.errno]
    return "not stopped"

def create(name):
    return os.open(name, os.O_CREAT | os.O_RDWR)

def fill_file(name):
    fill(create(name))
"""

_UNLINKED = """
fds = []
for number in range(40):
    fd = create(str(number))
    os.unlink(str(number))
    outcome = fill(fd, 2)
    fds.append(fd)
"""
_UNNAMED = """
fds, outcome = [], "not stopped"
for number in range(40):
    try:
        fds.append(os.open(".", os.O_TMPFILE | os.O_RDWR))
    except OSError as error:
        # Overlays of older kernels have none.
        outcome = fill(create("named")) if error.errno == errno.EOPNOTSUPP else outcome
        break
    outcome = fill(fds[-1], 2)
"""
_SPARSE = """
outcome = "not stopped"
for number in range(40):
    fd = create(str(number))
    os.ftruncate(fd, 20 * MIB)
    for offset in range(0, 20, 2):
        try:
            os.pwrite(fd, bytes(MIB), offset * MIB)
        except OSError as error:
            outcome = errno.errorcode[error.errno]
"""
_ALLOCATED = """
for number in range(8):
    fd = create(str(number))
    outcome = attempt(os.posix_fallocate, fd, 0, 16 * MIB)
    for offset in range(16):
        attempt(os.posix_fallocate, fd, offset * MIB, MIB)
        libc.fallocate(fd, 1, ctypes.c_long(offset * MIB), ctypes.c_long(MIB))
"""
_MAPPED = """
outcome = "not stopped"
fds = [create(str(number)) for number in range(4)]
for fd in fds:
    os.ftruncate(fd, 20 * MIB)
    pid = os.fork()
    if not pid:
        memory = mmap.mmap(fd, 20 * MIB)
        for offset in range(20):
            memory[offset * MIB : (offset + 1) * MIB] = b"x" * MIB
        memory.flush()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == 7:
        outcome = "SIGBUS"
os.sync()
"""
_LINKED = """
fd = create("0")
outcome = fill(fd)
for number in range(200):
    attempt(os.link, "0", f"link{number}")
fill(create("more"))
"""
_LOWER = """
outcome = fill(create("more"))
for folder, _, names in os.walk("/usr"):
    for name in names[:50]:
        attempt(os.chmod, f"{folder}/{name}", 0o777)
"""
_RENAMED = """
outcome = fill(create("more"))
for place in ("/tmp", "/bin", "/etc", "/"):
    attempt(os.rename, "more", f"{place}/more")
    attempt(os.mkdir, f"{place}/below")
    attempt(fill_file, f"{place}/another")
    attempt(os.rename, f"{place}/more", "more")
"""
_ATTRIBUTES = """
outcome = fill(create("more"))
for number in range(200):
    attempt(os.setxattr, "more", f"user.{number}", bytes(4000))
attempt(fill_file, "another")
"""
_PIPES = """
outcome = fill(create("more"))
for folder in ("/run/smokebox", "/run/smokebox/output"):
    attempt(create, f"{folder}/mine")
    attempt(os.mkfifo, f"{folder}/fifo")
"""
_ATTACKS = {
    "unlinked": _UNLINKED,
    "unnamed": _UNNAMED,
    "sparse": _SPARSE,
    "allocated": _ALLOCATED,
    "mapped": _MAPPED,
    "linked": _LINKED,
    "lower": _LOWER,
    "renamed": _RENAMED,
    "attributes": _ATTRIBUTES,
    "pipes": _PIPES,
}
# A program cannot leave its project: neither by number, nor for the files it creates.
_CHANGE_PROJECT = """
GET, SET = 0x801C581F, 0x401C5820
INHERIT = 0x200

def project(fd):
    fields = struct.unpack("=5I8s", fcntl.ioctl(fd, GET, bytes(28)))
    return [fields[3], fields[0] & INHERIT]

changed, refused = [], []
for path in (".", "/", "/tmp", "file"):
    fd = create(path) if path == "file" else os.open(path, os.O_RDONLY)
    # A directory of the image shows that of the layer until it is copied up.
    os.chmod(path, 0o777)
    os.close(fd)
    fd = os.open(path, os.O_RDONLY)
    before = project(fd)
    for number, flags in ((0, INHERIT), (before[0] + 1, before[1]), (before[0], 0), (7, 0)):
        packed = struct.pack("=5I8s", flags, 0, 0, number, 0, b"")
        refused.append(attempt(fcntl.ioctl, fd, SET, packed))
    # FS_IOC_SETFLAGS without FS_PROJINHERIT_FL, as `chattr -P` sends it.
    attempt(fcntl.ioctl, fd, 0x40086602, struct.pack("=Q", 0))
    if project(fd) != before:
        changed.append([path, before, project(fd)])
libc.syscall(443, fd, 0x580402, 7, bytes(112))
outcome = [changed, refused, errno.errorcode[ctypes.get_errno()], fill(create("more"))]
"""


@pytest.fixture(params=["xfs", "ext4"], scope="module")
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A file system with project quotas and an image with Python."""
    path = make_file_system(tmp_path_factory.mktemp("quota"), request.param)
    add_python(make_image(path / "image"))
    yield path
    unmount(path)


@pytest_asyncio.fixture
async def quota_host(disk: Path) -> AsyncIterator[Host]:
    """An engine with its state directory on that file system, and no sandboxes."""
    async with open_host(disk / "home", disk / "image") as host:
        yield host
        for info in await host.list():
            await host.sandbox(info.id).destroy()


async def create(host: Host, id: str) -> Sandbox:
    return await host.create(id, image="dir:small", limits={"disk": LIMIT})


async def attack(sandbox: Sandbox, code: str) -> Any:
    """Run an attack to its end, and return its outcome."""
    program = f"{PRELUDE}\n{_CODE}\n{code}\noutput([outcome, os.statvfs('.').f_bavail])"
    result = await sandbox.exec(["python3", "-ISc", program], timeout=40)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", _ATTACKS)
async def test_no_way_of_writing_passes_the_limit(quota_host: Host, name: str) -> None:
    sandbox = await create(quota_host, "attacker")
    neighbour = await create(quota_host, "neighbour")
    storage = quota_host._context.storage
    row = await sandbox.lifecycle.row()
    assert row is not None
    outcome = await attack(sandbox, _ATTACKS[name])
    assert outcome in ("ENOSPC", "EDQUOT", "SIGBUS"), outcome
    state = storage.quota(row.key)
    assert state is not None
    assert state.quota.bytes <= LIMIT
    folder = Path(storage.directory(row.key), "run", "io")
    pipes = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    assert pipes < PIPES_BYTES // 16
    info = await sandbox.info()
    assert info is not None
    assert (info.status, info.generation) == ("active", 1)
    assert (await neighbour.exec("head -c 16m /dev/zero > mine")).success


async def test_sandbox_cannot_leave_its_project(quota_host: Host) -> None:
    sandbox = await create(quota_host, "attacker")
    changed, refused, quotactl, outcome = await attack(sandbox, _CHANGE_PROJECT)
    assert changed == []
    assert "EINVAL" in refused
    assert quotactl in ("EPERM", "ENOSYS")
    assert outcome in ("ENOSPC", "EDQUOT")
    assert ((await sandbox.stats()).disk or 0) <= LIMIT
