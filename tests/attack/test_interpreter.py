"""Attacks by code in a context: forged frames, other contexts, and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import check_alive
from smokebox.engine.interpreter import kernel
from smokebox.errors import ProcessEnded, SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from attack.sandbox_code import Canary
    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import CodeExecution

pytestmark = pytest.mark.timeout(60)

SOURCES = Path(kernel.__file__).parent
# Finds the descriptor of the engine's pipe and the id of the running code.
FRAMES = """
import gc, json, os, sys
frames = next(o for o in gc.get_objects() if type(o).__name__ == 'Frames')
fd, id = frames._fd, frames.id
def send(data):
    view = memoryview(data if isinstance(data, bytes) else json.dumps(data).encode() + b'\\n')
    while view: view = view[os.write(fd, view):]
"""


async def run(sandbox: Sandbox, code: str, timeout: float = 10.0) -> CodeExecution:
    async with asyncio.timeout(40):
        return await sandbox.contexts.run(FRAMES + code, timeout=timeout)


async def test_forged_frames_affect_only_their_own_result(sandbox: Sandbox) -> None:
    result = await run(
        sandbox,
        "send({'type': 'end', 'id': 'another', 'count': 7})\n"
        "send({'type': 'output', 'id': id, 'stream': 'stdout', 'data': 'forged'})\n"
        "send({'type': 'ready', 'id': id})\nsend({'type': 'end', 'id': id, 'count': 10**12})",
    )
    assert (result.stdout, result.count) == ("forged", 10**12)
    assert (await sandbox.contexts.run("'next'")).text == "'next'"


async def test_forged_end_leaves_nothing_for_the_next_run(sandbox: Sandbox) -> None:
    await run(
        sandbox,
        "send({'type': 'end', 'id': id, 'count': 1})\n"
        "send({'type': 'output', 'id': id, 'stream': 'stdout', 'data': 'late'})",
    )
    result = await sandbox.contexts.run("print('mine')")
    assert result.stdout == "mine\n"


@pytest.mark.parametrize(
    "lines",
    [
        "b'\\n' * 100_000",
        "b'\\xff\\0{' * 1000 + b'\\n'",
        "b'{' * 1_000_000 + b'\\n'",
        "b'[' * 5_000_000",
        'b\'{"type":"result","id":"%s","data":{"x":\' % id.encode() + b\'[\' * 100_000 + b\'\\n\'',
        "b'x' * 50_000_000 + b'\\n'",
    ],
)
async def test_invalid_frames_are_dropped(sandbox: Sandbox, lines: str) -> None:
    result = await run(sandbox, f"send({lines} + b'\\n')\nprint('after')")
    assert result.truncated
    assert result.stdout == "after\n"
    await check_alive(sandbox)


# Tries everything that an owner may do with each descriptor of this process.
DESCRIPTORS = """
import json, os
held = []
for name in os.listdir('/proc/self/fd'):
    fd = int(name)
    try:
        status = os.fstat(fd)
    except OSError:
        continue
    held.append([status.st_dev, status.st_ino])
    for call in (lambda: os.fchmod(fd, 0o777), lambda: os.fchown(fd, 0, 0),
                 lambda: os.utime(fd, (0, 0)), lambda: os.setxattr(fd, 'user.x', b'y'),
                 lambda: os.open(f'/proc/self/fd/{fd}', os.O_RDWR | os.O_NONBLOCK)):
        try:
            call()
        except OSError:
            pass
print(json.dumps(held), flush=True)
"""


async def test_descriptors_lead_to_no_file_of_the_engine(
    sandbox: Sandbox, tier: str, tmp_path: Path
) -> None:
    """A context and a background process get pipes, not the engine's named pipes and logs."""
    await sandbox.contexts.run("1")
    cat = await sandbox.start_process(["cat"], stdin=True)
    [run_directory] = [path.parent for path in (tmp_path / "home" / "boxes").glob("*/run/io")]
    files = list(run_directory.rglob("*"))
    before = {path: _attributes(path) for path in files if path.suffix in (".in", ".exit")}
    assert any(path.suffix == ".in" for path in before)
    process = await sandbox.start_process(["python3", "-c", DESCRIPTORS], stdin=True)
    await process.wait_for_exit(10)
    held = [(await sandbox.contexts.run(DESCRIPTORS)).stdout, (await process.logs()).stdout]
    assert {path: _attributes(path) for path in before} == before
    if tier == "namespaces":
        # In gVisor these numbers are its own.
        inside = {tuple(pair) for text in held for pair in json.loads(text)}
        assert inside
        assert not inside & {_attributes(path)[:2] for path in before}
    await cat.write_stdin("still works\n")
    await cat.wait_for_log("still works", 10)
    assert (await sandbox.contexts.run("'next'")).text == "'next'"


def _attributes(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid


async def test_number_and_size_of_results_are_limited(sandbox: Sandbox) -> None:
    many = await run(sandbox, "for n in range(3000): display(n)", timeout=30)
    assert (len(many.results), many.truncated) == (1000, True)
    big = await run(
        sandbox,
        "for n in range(5): send({'type': 'result', 'id': id, 'data': {'text/html': 'x' * 10**7}})",
        timeout=30,
    )
    assert (len(big.results), big.truncated) == (3, True)


async def test_context_cannot_forge_results_of_another(sandbox: Sandbox) -> None:
    """The pipes of a context have no name that another could open, and its files are read-only."""
    one = await sandbox.contexts.create()
    await sandbox.contexts.run("secret = 1", context=one)
    found = await sandbox.exec("find /run/smokebox -type p -o -name '*~code*'")
    assert (found.exit_code, found.stdout) == (0, "")
    await sandbox.exec("for f in /run/smokebox/code-*/*/*; do echo changed >> $f; rm -f $f; done")
    [folder] = Path(await sandbox.lifecycle.directory(), "run", "io").glob("code-*")
    files = {path.name: path.read_bytes() for path in folder.glob("*/*")}
    assert files == {path.name: path.read_bytes() for path in SOURCES.iterdir() if path.is_file()}


async def test_stopped_or_killed_kernel_is_replaced(sandbox: Sandbox, neighbour: Sandbox) -> None:
    result = await run(sandbox, "os.kill(os.getpid(), 19)", timeout=0.5)
    assert (result.timed_out, result.context_ended) == (True, True)
    with pytest.raises((ProcessEnded, SandboxGone)):
        await run(sandbox, "os.kill(os.getppid(), 9)\nimport time; time.sleep(1000)")
    with contextlib.suppress(SmokeboxError):
        await run(sandbox, "os.kill(-1, 9)")
    await check_alive(sandbox)
    assert (await neighbour.contexts.run("1")).text == "1"


async def test_closing_every_descriptor_ends_with_the_timeout(sandbox: Sandbox) -> None:
    with contextlib.suppress(ProcessEnded):
        result = await run(sandbox, "os.closerange(0, 1000)\nwhile True: pass", timeout=0.5)
        assert result.timed_out
    await check_alive(sandbox)
    assert (await sandbox.contexts.run("1")).text == "1"


async def test_kernel_that_reads_no_requests_does_not_block(sandbox: Sandbox) -> None:
    """The engine writes more than the capacity of the pipe to a stopped kernel."""
    context = await sandbox.contexts.create()
    code = "import os, threading\nthreading.Thread(target=os.kill, args=(os.getpid(), 19)).start()"
    with contextlib.suppress(ProcessEnded):
        await sandbox.contexts.run(code, context=context, timeout=0.5)
    with contextlib.suppress(ProcessEnded):
        async with asyncio.timeout(20):
            result = await sandbox.contexts.run("#" * 1_000_000, context=context, timeout=0.5)
            assert result.timed_out
    await check_alive(sandbox)


async def test_code_sees_nothing_of_the_host(sandbox: Sandbox, canary: Canary) -> None:
    result = await sandbox.contexts.run(
        f"import os\nos.path.exists({str(canary.folder)!r}), os.getuid(), "
        "sorted(n for n in os.environ if 'SMOKEBOX' in n or 'KEY' in n)"
    )
    assert result.text == "(False, 0, [])"


async def test_fork_bomb_ends_with_its_context(sandbox: Sandbox) -> None:
    bomb = "import os, time\nfor n in range(50):\n    if not os.fork(): time.sleep(1000)\nprint(n)"
    context = await sandbox.contexts.create()
    result = await sandbox.contexts.run(bomb, context=context)
    assert result.stdout == "49\n"
    await sandbox.contexts.delete(context.id)
    left = await sandbox.exec("pgrep -c python3 || true")
    assert left.stdout == "0\n"


async def test_memory_exhaustion_ends_only_the_context(sandbox: Sandbox) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
    with contextlib.suppress(ProcessEnded):
        result = await run(
            sandbox, f"{limit}blocks = []\nwhile True: blocks.append(bytes(1 << 24))"
        )
        assert result.error is not None
        assert result.error.name == "MemoryError"
    assert (await sandbox.exec("echo works")).stdout == "works\n"
