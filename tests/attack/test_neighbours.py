"""Ways from one sandbox to another: ids, files, processes, memory, sockets, keys, names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from attack.inside import first_process, meanwhile, run

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

# Leaves something of every kind that could be shared, and stays.
OCCUPY = r"""
import mmap
for folder in ("/tmp", "/dev/shm", "/workspace", "/run", "/var/tmp", "/home"):
    write(f"{folder}/left-here", "neighbour's")
segment = libc.shmget(0x534D4F4B, 4096, 0o1666)
libc.semget(0x534D4F4B, 1, 0o1666)
libc.msgget(0x534D4F4B, 0o1666)
ask("mq_open", b"left-here", os.O_CREAT | os.O_RDWR, 0o666, None)
tcp = socket.create_server(("127.0.0.1", 45671))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\0left-here")
abstract.listen()
time.sleep(1000)
"""
SEARCH = r"""
found = []
for folder in ("/tmp", "/dev/shm", "/workspace", "/run", "/var/tmp", "/home"):
    if os.path.exists(f"{folder}/left-here"):
        found.append(folder)
if libc.shmget(0x534D4F4B, 4096, 0) != -1: found.append("shm")
if libc.semget(0x534D4F4B, 1, 0) != -1: found.append("sem")
if libc.msgget(0x534D4F4B, 0) != -1: found.append("msg")
if not isinstance(ask("mq_open", b"left-here", os.O_RDWR, 0, None), str): found.append("mq")
if attempt(socket.create_connection, ("127.0.0.1", 45671), 2) == "done": found.append("tcp")
if attempt(socket.socket(socket.AF_UNIX).connect, "\0left-here") == "done": found.append("abstract")
for name in ("tcp", "unix"):
    table = read(f"/proc/net/{name}") if os.path.exists(f"/proc/net/{name}") else ""
    if "left-here" in table or ":B267" in table:
        found.append(f"/proc/net/{name}")
for pid in pids():
    if b"left-here" in open(f"/proc/{pid}/cmdline", "rb").read() and pid != os.getpid():
        found.append(f"process {pid}")
tell(found)
"""


async def test_nothing_that_one_leaves_is_there_for_the_other(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    async with meanwhile(neighbour, OCCUPY):
        async with meanwhile(sandbox, OCCUPY):
            own = await run(sandbox, SEARCH)
        assert {"/tmp", "/dev/shm", "tcp", "abstract"} <= set(own), "the search finds nothing"
        await sandbox.destroy()
        assert await run(sandbox, SEARCH) == []


async def test_processes_of_another_have_no_pid_here(sandbox: Sandbox, neighbour: Sandbox) -> None:
    async with meanwhile(neighbour, "time.sleep(1000)"):
        answers = await run(
            sandbox,
            r"""
known, answers = set(pids()), set()
buffer = ctypes.create_string_buffer(8)
here = struct.pack("PN", ctypes.addressof(buffer), 8)
for pid in range(1, 400):
    if pid not in known:
        answers.add(attempt(os.kill, pid, 9))
        answers.add(ask("ptrace", 0x4206, pid, 0, 0))
        answers.add(ask("process_vm_readv", pid, here, 1, struct.pack("PN", 4096, 8), 1, 0))
        answers.add(attempt(os.pidfd_open, pid))
tell([sorted(answers), len(known)])
""",
        )
        assert set(answers[0]) <= {"ESRCH", "EPERM", "ENOSYS"}
        assert answers[1] <= 6
        assert (await neighbour.exec(["true"])).exit_code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="an engine without root has one user id to give")
async def test_each_has_ids_of_its_own(sandbox: Sandbox, neighbour: Sandbox) -> None:
    owners = []
    for box in (sandbox, neighbour):
        async with box.life.use() as running:
            owners.append(running.jail.owner)
    first, second = owners
    assert abs(first.uid - second.uid) >= max(first.count, second.count)
    assert min(first.uid, second.uid) > 65536
    for box, owner in zip((sandbox, neighbour), owners, strict=True):
        found = os.stat(f"/proc/{await first_process(box)}")
        # What cannot be looked into belongs to root, and runs as its own user.
        with open(f"/proc/{await first_process(box)}/status") as status:
            uids = next(line for line in status if line.startswith("Uid:")).split()[1:]
        assert found.st_uid in (0, owner.uid)
        assert {int(uid) for uid in uids} == {owner.uid}


async def test_ids_that_a_sandbox_was_not_given_cannot_be_taken(
    sandbox: Sandbox, tier: str, tmp_path: Path
) -> None:
    count = 65536 if os.geteuid() == 0 else 1
    answers = await run(
        sandbox,
        r"""
write("/workspace/file", "")
first = int(sys.argv[1])
tell([attempt(os.chown, "/workspace/file", first, 0),
      attempt(os.chown, "/workspace/file", 0x50000000, 0), ask("setfsuid", first) == 0,
      attempt(os.setgid, first), attempt(os.setuid, first)])
""",
        str(count),
    )
    if tier == "namespaces":
        assert answers == ["EINVAL", "EINVAL", True, "EINVAL", "EINVAL"]
    # gVisor has any number of ids for its own processes, and of files those that it was given.
    [file] = (tmp_path / "home" / "boxes").glob("*/data/upper/0/workspace/file")
    assert file.stat().st_uid == os.geteuid()


async def test_names_and_clocks_are_ones_own(sandbox: Sandbox, neighbour: Sandbox) -> None:
    assert (await sandbox.exec("hostname; hostname harm")).stdout == "attacker\n"
    assert (await neighbour.exec("uname -n")).stdout == "neighbour\n"
    assert (await sandbox.exec("date -s 2001-01-01")).exit_code != 0
    assert os.uname().nodename not in ("attacker", "neighbour", "harm")


async def test_keys_are_nobodys(sandbox: Sandbox) -> None:
    answers = await run(
        sandbox,
        r"""
tell([ask("add_key", b"user", b"left-here", b"x", 1, ring) for ring in (-1, -2, -3, -4, -5)]
     + [ask("keyctl", number, -4, 0, 0, 0) for number in range(0, 34)])
""",
    )
    assert set(answers) <= {"EPERM", "ENOSYS", "EACCES"}


async def test_the_state_of_others_is_closed_on_disk(
    sandbox: Sandbox, host: Host, tmp_path: Path
) -> None:
    """For whoever gets out as the sandbox's own user, there is another wall."""
    assert os.stat(host.home).st_mode & 0o077 == 0
    for path in (tmp_path / "home" / "boxes").glob("*/run/init.sock"):
        assert path.stat().st_mode & 0o077 == 0
