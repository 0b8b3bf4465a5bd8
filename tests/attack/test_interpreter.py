"""Attacks by code in a context: on the engine that reads what it says, and on its neighbours."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attack.inside import alive
from smokebox.engine.interpreter import kernel
from smokebox.errors import ProcessEnded, SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from attack.inside import Canary
    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import CodeExecution

pytestmark = pytest.mark.timeout(60)

SOURCES = Path(kernel.__file__).parent
# The descriptor that leads to the engine, and the id of what runs, as code finds them.
FRAMES = """
import gc, json, os, sys
frames = next(o for o in gc.get_objects() if type(o).__name__ == 'Frames')
fd, id = frames._fd, frames.id
def say(data):
    view = memoryview(data if isinstance(data, bytes) else json.dumps(data).encode() + b'\\n')
    while view: view = view[os.write(fd, view):]
"""


async def attempt(sandbox: Sandbox, code: str, timeout: float = 10.0) -> CodeExecution:
    async with asyncio.timeout(40):
        return await sandbox.contexts.run(FRAMES + code, timeout=timeout)


async def test_forged_frames_are_the_codes_own_word_and_no_more(sandbox: Sandbox) -> None:
    told = await attempt(
        sandbox,
        "say({'type': 'end', 'id': 'of another', 'count': 7})\n"
        "say({'type': 'output', 'id': id, 'stream': 'stdout', 'data': 'forged'})\n"
        "say({'type': 'ready', 'id': id})\nsay({'type': 'end', 'id': id, 'count': 10**12})",
    )
    assert (told.stdout, told.count) == ("forged", 10**12)
    assert (await sandbox.contexts.run("'next'")).text == "'next'"


async def test_an_end_before_the_end_leaves_nothing_for_the_next(sandbox: Sandbox) -> None:
    await attempt(
        sandbox,
        "say({'type': 'end', 'id': id, 'count': 1})\n"
        "say({'type': 'output', 'id': id, 'stream': 'stdout', 'data': 'late'})",
    )
    told = await sandbox.contexts.run("print('mine')")
    assert told.stdout == "mine\n"


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
async def test_nonsense_for_the_engine_costs_a_word(sandbox: Sandbox, lines: str) -> None:
    told = await attempt(sandbox, f"say({lines} + b'\\n')\nprint('after')")
    assert told.truncated
    assert told.stdout == "after\n"
    await alive(sandbox)


async def test_too_many_results_and_too_large_ones_are_cut(sandbox: Sandbox) -> None:
    many = await attempt(sandbox, "for n in range(3000): display(n)", timeout=30)
    assert (len(many.results), many.truncated) == (1000, True)
    big = await attempt(
        sandbox,
        "for n in range(5): say({'type': 'result', 'id': id, 'data': {'text/html': 'x' * 10**7}})",
        timeout=30,
    )
    assert (len(big.results), big.truncated) == (3, True)


async def test_a_context_cannot_answer_for_another(sandbox: Sandbox) -> None:
    """The pipes of one context are no names that another could open, nor can it be rewritten."""
    one = await sandbox.contexts.create()
    await sandbox.contexts.run("secret = 1", context=one)
    found = await sandbox.exec("find /run/smokebox -type p -o -name '*~code*'")
    assert (found.exit_code, found.stdout) == (0, "")
    await sandbox.exec("for f in /run/smokebox/code-*/*/*; do echo harm >> $f; rm -f $f; done")
    [folder] = Path(await sandbox.life.directory(), "run", "io").glob("code-*")
    kept = {path.name: path.read_bytes() for path in folder.glob("*/*")}
    assert kept == {path.name: path.read_bytes() for path in SOURCES.iterdir() if path.is_file()}


async def test_a_kernel_that_is_stopped_or_killed_is_given_up(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    told = await attempt(sandbox, "os.kill(os.getpid(), 19)", timeout=0.5)
    assert (told.timed_out, told.context_ended) == (True, True)
    with pytest.raises((ProcessEnded, SandboxGone)):
        await attempt(sandbox, "os.kill(os.getppid(), 9)\nimport time; time.sleep(1000)")
    with contextlib.suppress(SmokeboxError):
        await attempt(sandbox, "os.kill(-1, 9)")
    await alive(sandbox)
    assert (await neighbour.contexts.run("1")).text == "1"


async def test_closing_every_descriptor_ends_with_the_timeout(sandbox: Sandbox) -> None:
    with contextlib.suppress(ProcessEnded):
        told = await attempt(sandbox, "os.closerange(0, 1000)\nwhile True: pass", timeout=0.5)
        assert told.timed_out
    await alive(sandbox)
    assert (await sandbox.contexts.run("1")).text == "1"


async def test_what_reads_no_requests_holds_nobody(sandbox: Sandbox) -> None:
    """The engine writes more than the pipe takes, to a kernel that does not read."""
    context = await sandbox.contexts.create()
    code = "import os, threading\nthreading.Thread(target=os.kill, args=(os.getpid(), 19)).start()"
    with contextlib.suppress(ProcessEnded):
        await sandbox.contexts.run(code, context=context, timeout=0.5)
    with contextlib.suppress(ProcessEnded):
        async with asyncio.timeout(20):
            told = await sandbox.contexts.run("#" * 1_000_000, context=context, timeout=0.5)
            assert told.timed_out
    await alive(sandbox)


async def test_code_sees_nothing_of_the_host(sandbox: Sandbox, canary: Canary) -> None:
    told = await sandbox.contexts.run(
        f"import os\nos.path.exists({str(canary.folder)!r}), os.getuid(), "
        "sorted(n for n in os.environ if 'SMOKEBOX' in n or 'KEY' in n)"
    )
    assert told.text == "(False, 0, [])"


async def test_a_fork_bomb_ends_with_its_context(sandbox: Sandbox) -> None:
    bomb = "import os, time\nfor n in range(50):\n    if not os.fork(): time.sleep(1000)\nprint(n)"
    context = await sandbox.contexts.create()
    told = await sandbox.contexts.run(bomb, context=context)
    assert told.stdout == "49\n"
    await sandbox.contexts.delete(context.id)
    left = await sandbox.exec("pgrep -c python3 || true")
    assert left.stdout == "0\n"


async def test_memory_without_end_costs_the_context_and_not_the_engine(sandbox: Sandbox) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
    with contextlib.suppress(ProcessEnded):
        told = await attempt(sandbox, f"{limit}held = []\nwhile True: held.append(bytes(1 << 24))")
        assert told.error is not None
        assert told.error.name == "MemoryError"
    assert (await sandbox.exec("echo on")).stdout == "on\n"
