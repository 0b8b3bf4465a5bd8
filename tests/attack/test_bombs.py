"""Sandboxes that use up all there is: the host and the neighbour go on, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from attack.inside import PRELUDE, alive, first_process, meanwhile, run
from smokebox.errors import SandboxGone, SmokeboxError
from smokebox.limits import MIB, Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

SMALL = Limits(memory=192 * MIB, pids=64, disk=48 * MIB, open_files=1024)


# Keeps up to 300 MiB, and says so on stderr.
UNMAPPED = """
kept, size = [], 0
while size < 300 << 20:
    if how == "memfds":
        kept.append(os.memfd_create("x"))
        size += os.write(kept[-1], b"x" * (2 << 20))
    elif how == "sockets":
        kept.append(socket.socketpair())
        kept[-1][0].setblocking(False)
        size += kept[-1][0].send(b"x" * (1 << 20))
    else:
        kept.append(os.pipe())
        os.set_blocking(kept[-1][1], False)
        size += os.write(kept[-1][1], b"x" * 65536)
sys.stderr.write("kept 300")
"""


@pytest_asyncio.fixture
async def bomb(host: Host, neighbour: Sandbox) -> AsyncIterator[Sandbox]:
    """A small sandbox, of which nothing may be left after the test."""
    bomb = await host.create("bomb", limits=SMALL)
    row = await bomb.life.row()
    assert row is not None
    pid = await first_process(bomb)
    yield bomb
    await alive(neighbour)
    await bomb.destroy()
    assert not os.path.exists(os.path.join(host.home, "boxes", row.key))
    assert not os.path.exists(f"/proc/{pid}")
    assert not [
        path for path in Path("/sys/fs/cgroup").glob("*/smokebox/*") if row.key in path.name
    ]


async def explode(bomb: Sandbox, command: str | list[str], *, seconds: float = 2.0) -> str:
    """Set it off; what is said of how it ended."""
    try:
        async with asyncio.timeout(17):
            result = await bomb.exec(command, timeout=seconds)
    except SandboxGone as error:
        assert error.reason
        return str(error.reason)
    return f"exit {result.exit_code} {result.stderr[-300:]}"


def python(code: str) -> list[str]:
    """A program that goes off inside."""
    return ["python3", "-c", PRELUDE + code]


async def test_forks(bomb: Sandbox, neighbour: Sandbox) -> None:
    going = asyncio.create_task(explode(bomb, "f() { f | f & }; f; sleep 1000", seconds=1))
    await asyncio.sleep(0.5)
    await alive(neighbour)
    await going
    async with bomb.life.use() as running:
        await running.jail.stats()
    await bomb.sleep()
    await alive(bomb)


async def test_memory(bomb: Sandbox, neighbour: Sandbox) -> None:
    said = await explode(
        bomb,
        python("kept = []\nwhile True:\n    kept.append(bytearray(b'x' * (8 << 20)))"),
        seconds=10,
    )
    await alive(neighbour)
    assert "exit 137" in said or "memory" in said.lower(), said
    await alive(bomb)


async def test_memory_of_many_processes(bomb: Sandbox, neighbour: Sandbox) -> None:
    """Each within what one process may have, and all together far beyond."""
    said = await explode(
        bomb,
        python(
            "for _ in range(12):\n    if os.fork() == 0:\n        break\n"
            "kept = bytearray(b'x' * (60 << 20))\ntime.sleep(8)\ntell('kept')"
        ),
        seconds=12,
    )
    await alive(neighbour)
    assert "kept" not in said
    used = (await bomb.stats()).memory
    assert used is None or used <= SMALL.memory * 2 if SMALL.memory else True
    await bomb.sleep()
    await alive(bomb)


async def test_memory_as_files(bomb: Sandbox, neighbour: Sandbox) -> None:
    """/dev/shm is memory too, and has a size."""
    said = await explode(bomb, "dd if=/dev/zero of=/dev/shm/file bs=1M count=400", seconds=10)
    assert "exit 1" in said or "memory" in said.lower(), said
    await alive(neighbour)


@pytest.mark.parametrize("how", ["memfds", "sockets", "pipes"])
async def test_memory_that_no_process_maps(bomb: Sandbox, neighbour: Sandbox, how: str) -> None:
    """Of what nobody has mapped, only a cgroup knows whose it is."""
    said = await explode(bomb, python(f"how = {how!r}\n" + UNMAPPED), seconds=10)
    await alive(neighbour)
    known = await bomb.info()
    if known is not None and known.enforcement == "rlimits" and "kept 300" in said:
        pytest.xfail("without a cgroup nobody counts the memory of memfds")
    assert "kept 300" not in said, said
    await bomb.sleep()
    await alive(bomb)


async def test_descriptors(bomb: Sandbox, neighbour: Sandbox) -> None:
    count = await run(
        bomb,
        "kept = []\ntry:\n    while True:\n        kept.append(os.open('/dev/null', 0))\n"
        "except OSError as error:\n    tell([len(kept), errno.errorcode[error.errno]])",
    )
    assert count[0] < 1024
    assert count[1] == "EMFILE"
    await alive(neighbour)


async def test_watches_that_the_kernel_counts_for_the_host(
    bomb: Sandbox, neighbour: Sandbox
) -> None:
    """It counts them for who made the sandbox too, and 128 is all that most hosts give a user."""
    async with meanwhile(bomb, "while libc.inotify_init1(0) != -1:\n    pass\ntime.sleep(1000)"):
        await asyncio.sleep(0.3)
        process = await neighbour.start_process(["true"])
        assert await process.wait_for_exit(10) == 0
        stream = await neighbour.files.watch("/workspace")
        await stream.aclose()


async def test_descriptors_in_flight(bomb: Sandbox, neighbour: Sandbox) -> None:
    """They count for the user: beyond his limit of open files, nobody of his can send any."""
    code = """
kept = []
try:
    while True:
        kept.append(socket.socketpair())
        for _ in range(20):
            socket.send_fds(kept[-1][0], [b"x"], [0] * 250)
except OSError:
    time.sleep(1000)
"""
    async with meanwhile(bomb, code):
        await asyncio.sleep(0.5)
        await alive(neighbour)


async def test_one_file_that_fills_the_disk(bomb: Sandbox) -> None:
    said = await explode(bomb, "dd if=/dev/zero of=/workspace/big bs=1M count=500", seconds=10)
    assert "exit 153" in said or "disk" in said, said
    async with asyncio.timeout(15):
        while True:
            try:
                await bomb.rm("/workspace/big", force=True)
                await alive(bomb)
                break
            except SandboxGone as error:
                # It was full when it was last looked at.
                assert "disk" in str(error.reason)


async def test_many_files_that_fill_the_disk(bomb: Sandbox, neighbour: Sandbox) -> None:
    said = await explode(
        bomb,
        "for i in $(seq 60); do head -c 8M /dev/zero > /workspace/f$i; sleep 0.05; done; sleep 99",
        seconds=14,
    )
    assert "disk" in said, said
    known = await bomb.info()
    assert known is not None
    assert "disk" in (known.stop_reason or "")
    await alive(neighbour)


async def test_small_files_and_links_without_number(bomb: Sandbox, neighbour: Sandbox) -> None:
    """There is no limit on how many: what they take of the disk is, and all of it goes."""
    made = await run(
        bomb,
        "os.chdir('/workspace')\nfor n in range(2000):\n    os.symlink('x' * 100, f'l{n}')\n"
        "    os.mknod(f'f{n}')\n    os.link(f'f{n}', f'h{n}')\ntell('made')",
    )
    assert made == "made"
    await alive(neighbour)


async def test_deep_and_closed_directories(bomb: Sandbox) -> None:
    made = await run(
        bomb,
        """
os.chdir("/workspace")
for name in ("closed", "unreadable"):
    os.makedirs(f"{name}/in/in")
    write(f"{name}/in/file", "x")
    os.chmod(f"{name}/in", 0)
    os.chmod(name, 0)
for _ in range(1500):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
tell("made")
""",
    )
    assert made == "made"
    await bomb.stats()
    with contextlib.suppress(SmokeboxError):
        await bomb.glob("/workspace/**")


async def test_output(sandbox: Sandbox, neighbour: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    going = asyncio.create_task(sandbox.exec("yes", timeout=1.5))
    await asyncio.sleep(0.3)
    await alive(neighbour)
    result = await going
    assert result.timed_out
    assert len(result.stdout) <= 17 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


async def test_output_that_nobody_reads(bomb: Sandbox, neighbour: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = bomb.exec_stream("yes & yes >&2", timeout=10)
    async for _ in stream:
        break
    await asyncio.sleep(1)
    await alive(neighbour)
    await stream.aclose()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10
    assert (await bomb.exec("pgrep -c yes")).stdout == "0\n"


async def test_logs(bomb: Sandbox, host: Host, neighbour: Sandbox) -> None:
    process = await bomb.start_process("yes")
    await asyncio.sleep(1)
    await alive(neighbour)
    with contextlib.suppress(SmokeboxError):
        await process.kill()
    blocks = sum(path.lstat().st_blocks * 512 for path in Path(host.home).glob("boxes/*/run/**/*"))
    assert blocks < 256 * MIB


async def test_archives_of_sparse_files(bomb: Sandbox) -> None:
    await bomb.exec("for i in $(seq 40); do truncate -s 40M /workspace/s$i; done")
    total = 0
    stream = bomb.files.download_tar("/workspace")
    async for piece in stream:
        total += len(piece)
        if total > 8 * MIB:
            break
    await stream.aclose()
    await alive(bomb)


async def test_all_terminals_that_there_are(bomb: Sandbox) -> None:
    """The kernel has 4096 of them for all: one sandbox gets a share."""
    taken = int(Path("/proc/sys/kernel/pty/nr").read_text())
    code = """
kept = []
try:
    while len(kept) < 900:
        kept.append(os.openpty())
except OSError:
    pass
print(len(kept), flush=True)
time.sleep(30)
"""
    async with bomb.exec_stream(python(code), timeout=30) as stream:
        async for chunk in stream:
            assert int(chunk.data) <= 512
            break
        # Tests beside this one have some of their own.
        assert int(Path("/proc/sys/kernel/pty/nr").read_text()) - taken < 400
