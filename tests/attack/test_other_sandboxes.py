"""Attacks on another sandbox: ids, files, processes, memory, sockets, keys, names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import guest_init_pid, run, running_inside

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

# Creates one object of every kind that could be shared, and keeps running.
CREATE_ALL = r"""
import mmap
for folder in ("/tmp", "/dev/shm", "/workspace", "/run", "/var/tmp", "/home"):
    write(f"{folder}/canary", "of the other")
segment = libc.shmget(0x534D4F4B, 4096, 0o1666)
libc.semget(0x534D4F4B, 1, 0o1666)
libc.msgget(0x534D4F4B, 0o1666)
syscall("mq_open", b"canary", os.O_CREAT | os.O_RDWR, 0o666, None)
tcp = socket.create_server(("127.0.0.1", 45671))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\0canary")
abstract.listen()
time.sleep(1000)
"""
SEARCH = r"""
found = []
for folder in ("/tmp", "/dev/shm", "/workspace", "/run", "/var/tmp", "/home"):
    if os.path.exists(f"{folder}/canary"):
        found.append(folder)
if libc.shmget(0x534D4F4B, 4096, 0) != -1: found.append("shm")
if libc.semget(0x534D4F4B, 1, 0) != -1: found.append("sem")
if libc.msgget(0x534D4F4B, 0) != -1: found.append("msg")
if not isinstance(syscall("mq_open", b"canary", os.O_RDWR, 0, None), str): found.append("mq")
if attempt(socket.create_connection, ("127.0.0.1", 45671), 2) == "done": found.append("tcp")
if attempt(socket.socket(socket.AF_UNIX).connect, "\0canary") == "done": found.append("abstract")
for name in ("tcp", "unix"):
    table = read(f"/proc/net/{name}") if os.path.exists(f"/proc/net/{name}") else ""
    if "canary" in table or ":B267" in table:
        found.append(f"/proc/net/{name}")
for pid in pids():
    if b"canary" in open(f"/proc/{pid}/cmdline", "rb").read() and pid != os.getpid():
        found.append(f"process {pid}")
output(found)
"""


async def test_objects_of_one_sandbox_are_invisible_to_another(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    async with running_inside(neighbour, CREATE_ALL):
        async with running_inside(sandbox, CREATE_ALL):
            found = await run(sandbox, SEARCH)
        assert {"/tmp", "/dev/shm", "tcp", "abstract"} <= set(found), "the search finds nothing"
        await sandbox.destroy()
        assert await run(sandbox, SEARCH) == []


async def test_processes_of_another_sandbox_have_no_pid(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    async with running_inside(neighbour, "time.sleep(1000)"):
        results = await run(
            sandbox,
            r"""
known, results = set(pids()), set()
buffer = ctypes.create_string_buffer(8)
here = struct.pack("PN", ctypes.addressof(buffer), 8)
for pid in range(1, 400):
    if pid not in known:
        results.add(attempt(os.kill, pid, 9))
        results.add(syscall("ptrace", 0x4206, pid, 0, 0))
        results.add(syscall("process_vm_readv", pid, here, 1, struct.pack("PN", 4096, 8), 1, 0))
        results.add(attempt(os.pidfd_open, pid))
output([sorted(results), len(known)])
""",
        )
        assert set(results[0]) <= {"ESRCH", "EPERM", "ENOSYS"}
        assert results[1] <= 6
        assert (await neighbour.exec(["true"])).exit_code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="an engine without root has one user id")
async def test_sandboxes_have_different_ids(sandbox: Sandbox, neighbour: Sandbox) -> None:
    owners = []
    for one in (sandbox, neighbour):
        async with one.lifecycle.use() as run:
            owners.append(run.jail.owner)
    first, second = owners
    assert abs(first.uid - second.uid) >= max(first.count, second.count)
    assert min(first.uid, second.uid) > 65536
    for one, owner in zip((sandbox, neighbour), owners, strict=True):
        found = os.stat(f"/proc/{await guest_init_pid(one)}")
        # /proc entries of a process that is not dumpable belong to root.
        with open(f"/proc/{await guest_init_pid(one)}/status") as status:
            uids = next(line for line in status if line.startswith("Uid:")).split()[1:]
        assert found.st_uid in (0, owner.uid)
        assert {int(uid) for uid in uids} == {owner.uid}


async def test_unmapped_ids_cannot_be_used(sandbox: Sandbox, tier: str, tmp_path: Path) -> None:
    count = 65536 if os.geteuid() == 0 else 1
    results = await run(
        sandbox,
        r"""
write("/workspace/file", "")
first = int(sys.argv[1])
output([attempt(os.chown, "/workspace/file", first, 0),
      attempt(os.chown, "/workspace/file", 0x50000000, 0), syscall("setfsuid", first) == 0,
      attempt(os.setgid, first), attempt(os.setuid, first)])
""",
        str(count),
    )
    if tier == "namespaces":
        assert results == ["EINVAL", "EINVAL", True, "EINVAL", "EINVAL"]
    # gVisor has any number of ids for its processes, but files have those of the sandbox.
    [file] = (tmp_path / "home" / "boxes").glob("*/data/upper/0/workspace/file")
    assert file.stat().st_uid == os.geteuid()


async def test_hostname_and_clock_cannot_be_changed(sandbox: Sandbox, neighbour: Sandbox) -> None:
    assert (await sandbox.exec("hostname; hostname changed")).stdout == "attacker\n"
    assert (await neighbour.exec("uname -n")).stdout == "neighbour\n"
    assert (await sandbox.exec("date -s 2001-01-01")).exit_code != 0
    assert os.uname().nodename not in ("attacker", "neighbour", "changed")


async def test_kernel_keyrings_are_refused(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
output([syscall("add_key", b"user", b"canary", b"x", 1, ring) for ring in (-1, -2, -3, -4, -5)]
     + [syscall("keyctl", number, -4, 0, 0, 0) for number in range(0, 34)])
""",
    )
    assert set(results) <= {"EPERM", "ENOSYS", "EACCES"}


async def test_state_directory_is_closed_to_other_users(
    sandbox: Sandbox, host: Host, tmp_path: Path
) -> None:
    """A process that escapes as the user of its sandbox must not read them."""
    assert os.stat(host.home).st_mode & 0o077 == 0
    for path in (tmp_path / "home" / "boxes").glob("*/run/init.sock"):
        assert path.stat().st_mode & 0o077 == 0
