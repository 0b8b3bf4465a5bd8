"""Code contexts in real sandboxes: state, output, timeouts, deaths and adoption."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.engine.host import Host
from smokebox.engine.interpreter import context as context_module
from smokebox.engine.interpreter import contexts as contexts_module
from smokebox.engine.record.rows import ContextRow
from smokebox.errors import (
    Conflict,
    InvalidOption,
    LimitReached,
    NotFound,
    PathNotFound,
    ProcessEnded,
    SandboxGone,
    SandboxRestarted,
    Unsupported,
)
from smokebox.types import CodeResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox

# Code that ends only when it is interrupted, and creates a file when it starts.
ENDLESS = "import time\nopen('started', 'w').close()\nwhile True: time.sleep(0.01)"


@pytest_asyncio.fixture
async def sandbox(host: Host) -> Sandbox:
    return await host.create("box")


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(15):
        while not await condition():
            await asyncio.sleep(0.01)


async def wait_for_start(sandbox: Sandbox) -> None:
    """Wait until `ENDLESS` runs."""
    await eventually(lambda: sandbox.exists("started"))
    await sandbox.rm("started")


async def test_names_last_between_executions(sandbox: Sandbox) -> None:
    first = await sandbox.contexts.run("import math\nx = 20\ndef f(): return x + 1")
    second = await sandbox.contexts.run("x += 1\nprint(math.floor(1.5))\nf() * 2")
    assert (first.results, first.count, first.success) == ((), 1, True)
    assert (second.text, second.stdout, second.count) == ("44", "1\n", 2)
    assert second.results == (CodeResult(text="44", main=True),)


async def test_contexts_are_separate_processes(sandbox: Sandbox) -> None:
    one, other = await sandbox.contexts.create(), await sandbox.contexts.create()
    await sandbox.contexts.run("x = 1; import os", context=one)
    execution = await sandbox.contexts.run("x", context=other)
    assert execution.error is not None
    assert (execution.error.name, execution.count) == ("NameError", 1)
    pids = {
        (await sandbox.contexts.run("import os; os.getpid()", context=c)).text for c in (one, other)
    }
    assert len(pids) == 2


async def test_shared_context_is_not_a_created_one(sandbox: Sandbox) -> None:
    created = await sandbox.contexts.create()
    await sandbox.contexts.run("x = 'mine'", context=created)
    execution = await sandbox.contexts.run("x")
    assert execution.error is not None
    assert execution.context != created.id
    assert [one.info.default for one in await sandbox.contexts.list()] == [False, True]
    assert (await sandbox.contexts.run("x", context=created.id)).text == "'mine'"


async def test_context_starts_with_its_cwd_and_env(sandbox: Sandbox) -> None:
    context = await sandbox.contexts.create(cwd="/tmp", env={"A": "of the context"})
    execution = await sandbox.contexts.run(
        "import os; os.getcwd(), os.environ['A']", context=context
    )
    assert execution.text == "('/tmp', 'of the context')"
    assert context.info.cwd == "/tmp"


async def test_env_of_a_call_ends_with_it(sandbox: Sandbox) -> None:
    context = await sandbox.contexts.create(env={"A": "context"})
    code = "import os; os.environ.get('A'), os.environ.get('B')"
    during = await sandbox.contexts.run(code, context=context, env={"A": "call", "B": "b"})
    after = await sandbox.contexts.run(code, context=context)
    assert (during.text, after.text) == ("('call', 'b')", "('context', None)")


async def test_error_has_a_line_and_no_kernel_frames(sandbox: Sandbox) -> None:
    execution = await sandbox.contexts.run("def f():\n    raise ValueError('no')\n\nf()")
    error = execution.error
    assert error is not None
    assert (error.name, error.message, error.line) == ("ValueError", "no", 2)
    assert error.traceback.splitlines()[0] == "Traceback (most recent call last):"
    assert "raise ValueError('no')" in error.traceback
    assert "smokebox" not in error.traceback
    later = await sandbox.contexts.run("\n\nf()")
    assert later.error is not None
    assert later.error.line == 3
    broken = await sandbox.contexts.run("x = 1\nif x\n")
    assert broken.error is not None
    assert (broken.error.name, broken.error.line) == ("SyntaxError", 2)


async def test_sys_exit_is_an_error_and_keeps_the_context(sandbox: Sandbox) -> None:
    execution = await sandbox.contexts.run("import sys\nkept = 1\nsys.exit(3)")
    assert execution.error is not None
    assert (execution.error.name, execution.error.message) == ("SystemExit", "3")
    assert (await sandbox.contexts.run("kept")).text == "1"


async def test_output_is_in_the_order_of_writing(sandbox: Sandbox) -> None:
    code = (
        "import os, subprocess, sys\nprint('a')\nos.system('echo b')\nprint('c')\n"
        "subprocess.run(['echo', 'd'])\nos.write(1, b'e\\n')\nsys.stdout.buffer.write(b'f\\n')\n"
        "print('err', file=sys.stderr)"
    )
    execution = await sandbox.contexts.run(code)
    assert (execution.stdout, execution.stderr) == ("a\nb\nc\nd\ne\nf\n", "err\n")


async def test_invalid_utf8_is_replaced(sandbox: Sandbox) -> None:
    code = (
        "import os\nos.write(1, '€'.encode()[:2])\nos.write(1, '€'.encode()[2:])\n"
        "os.write(1, b'\\xff\\0')"
    )
    assert (await sandbox.contexts.run(code)).stdout == "€\ufffd\0"
    assert (await sandbox.contexts.run("print('\\ud800', '\U0001f600')")).stdout == "\\ud800 😀\n"


async def test_events_are_streamed_as_they_happen(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nprint('first')\ndisplay('shown')\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n6 * 7"
    )
    events: list[object] = []
    async with sandbox.contexts.stream(code) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == 2:
                await sandbox.write_file("go", "")
    assert events[0] == OutputChunk("stdout", "first\n")
    assert events[1:] == [CodeResult(text="'shown'"), CodeResult(text="42", main=True)]
    assert (stream.execution.count, stream.execution.success) == (1, True)
    assert stream.execution.results == ()


async def test_timeout_interrupts_code_and_keeps_the_state(sandbox: Sandbox) -> None:
    await sandbox.contexts.run("x = 1")
    execution = await sandbox.contexts.run(f"print('early')\n{ENDLESS}", timeout=0.5)
    assert (execution.timed_out, execution.context_ended, execution.stdout) == (
        True,
        False,
        "early\n",
    )
    assert execution.error is not None
    assert execution.error.name == "TimeoutError"
    assert "0.5 s" in execution.error.message
    after = await sandbox.contexts.run("x")
    assert (after.text, after.count, after.context) == ("1", 3, execution.context)


async def test_timeout_of_a_context_is_the_default_of_its_calls(sandbox: Sandbox) -> None:
    context = await sandbox.contexts.create(timeout=0.3)
    assert (await sandbox.contexts.run(ENDLESS, context=context)).timed_out
    code = "import time; time.sleep(0.5); 'done'"
    assert (await sandbox.contexts.run(code, context=context, timeout=15)).text == "'done'"


async def test_timeout_interrupts_code_that_writes_all_the_time(sandbox: Sandbox) -> None:
    execution = await sandbox.contexts.run("while True: print('x' * 100)", timeout=0.3)
    assert execution.timed_out
    assert execution.stdout.startswith("xxx")
    assert (await sandbox.contexts.run("1")).text == "1"


async def test_timeout_kills_a_context_that_ignores_interrupts(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "INTERRUPT_SECONDS", 0.3)
    uninterruptible = (
        f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('on')\n{ENDLESS}"
    )
    context = await sandbox.contexts.create()
    execution = await sandbox.contexts.run(uninterruptible, context=context, timeout=0.3)
    assert (execution.timed_out, execution.context_ended, execution.stdout) == (True, True, "on\n")
    assert execution.error is not None
    with pytest.raises(ProcessEnded, match="did not end after an interrupt"):
        await sandbox.contexts.run("1", context=context)
    # Another shared context takes its place.
    assert (await sandbox.contexts.run(uninterruptible, timeout=0.3)).context_ended
    assert (await sandbox.contexts.run("'fresh'")).count == 1


async def test_cancelling_a_call_interrupts_the_code(sandbox: Sandbox) -> None:
    await sandbox.contexts.run("x = 'kept'")
    running = asyncio.create_task(sandbox.contexts.run(ENDLESS))
    await wait_for_start(sandbox)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await sandbox.contexts.run("x")).text == "'kept'"


async def test_closing_a_stream_interrupts_the_code(sandbox: Sandbox) -> None:
    async with sandbox.contexts.stream(f"print('on')\n{ENDLESS}") as stream:
        async for _ in stream:
            break
    assert (await sandbox.contexts.run("'next'")).text == "'next'"
    with pytest.raises(RuntimeError):
        _ = stream.execution


async def test_interrupt_reaches_child_processes_and_awaits(sandbox: Sandbox) -> None:
    for code in ("import os; os.system('sleep 1000')", "import asyncio\nawait asyncio.sleep(1000)"):
        execution = await sandbox.contexts.run(code, timeout=0.3)
        assert (execution.timed_out, execution.context_ended) == (True, False)
    assert (await sandbox.exec("pgrep -c sleep")).stdout == "0\n"


async def test_executions_of_a_context_run_in_order(sandbox: Sandbox) -> None:
    await sandbox.contexts.run("seen = []")
    codes = [f"import time; time.sleep(0.02); seen.append({n})" for n in range(5)]
    await asyncio.gather(*(sandbox.contexts.run(code) for code in codes))
    assert (await sandbox.contexts.run("seen")).results[0].json == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("code", "exit_code", "message"),
    [
        ("import os; os._exit(3)", 3, "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", 139, "signal 11"),
        ("import os; os.kill(os.getpid(), 9)", 137, "killed"),
    ],
)
async def test_calls_to_a_dead_context_raise_process_ended(
    sandbox: Sandbox, code: str, exit_code: int, message: str
) -> None:
    context = await sandbox.contexts.create()
    for attempt in (code, "1"):
        with pytest.raises(ProcessEnded, match=message) as caught:
            await sandbox.contexts.run(attempt, context=context)
        assert caught.value.fields == {"process": context.id, "exit_code": exit_code}
    assert await sandbox.contexts.list() == []


async def test_context_that_runs_out_of_memory_dies_alone(host: Host) -> None:
    sandbox = await host.create("box", limits={"memory": "256MiB"})
    context = await sandbox.contexts.create()
    if (await sandbox.info() or pytest.fail()).enforcement == "rlimits":
        pytest.skip("this host cannot limit the memory of a whole sandbox")
    code = "held = []\nwhile True: held.append(bytearray(b'x') * (1 << 24))"
    with pytest.raises(ProcessEnded, match="out of memory"):
        await sandbox.contexts.run(code, context=context)
    assert (await sandbox.contexts.run("1")).text == "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")
async def test_code_runs_as_the_user_of_its_sandbox(host: Host) -> None:
    sandbox = await host.create("box", user="user")
    assert (await sandbox.contexts.run("import os; os.getuid()")).text == "1000"
    assert (await sandbox.contexts.run("process.getuid()", language="js")).text == "1000"


async def test_output_before_a_death_is_streamed(sandbox: Sandbox) -> None:
    events = []
    with pytest.raises(ProcessEnded):
        async with sandbox.contexts.stream(
            "import os\nprint('last', flush=True)\nos._exit(1)"
        ) as stream:
            async for event in stream:
                events += [event]
    assert events == [OutputChunk("stdout", "last\n")]


async def test_sleep_ends_contexts_with_the_reason(sandbox: Sandbox) -> None:
    context = await sandbox.contexts.create()
    await sandbox.contexts.run("x = 1")
    await sandbox.sleep()
    assert await sandbox.contexts.list() == []
    assert (await sandbox.info() or pytest.fail()).status == "idle"
    with pytest.raises(SandboxRestarted, match="it fell asleep"):
        await sandbox.contexts.run("1", context=context.id)
    execution = await sandbox.contexts.run("x")
    assert execution.error is not None
    assert execution.count == 1


async def test_sleep_and_destroy_end_running_code(sandbox: Sandbox) -> None:
    for end in (sandbox.sleep, sandbox.destroy):
        running = asyncio.create_task(sandbox.contexts.run(ENDLESS))
        await wait_for_start(sandbox)
        await end()
        with pytest.raises(SandboxGone):
            await running


async def test_delete_kills_a_context_with_its_processes(sandbox: Sandbox) -> None:
    context = await sandbox.contexts.create("mine")
    await sandbox.contexts.run(
        "import subprocess; subprocess.Popen(['sleep', '1000'])", context="mine"
    )
    running = asyncio.create_task(sandbox.contexts.run(ENDLESS, context=context))
    await wait_for_start(sandbox)
    await sandbox.contexts.delete("mine")
    with pytest.raises(NotFound, match="was deleted"):
        await running
    assert (await sandbox.exec("pgrep -c sleep")).stdout == "0\n"
    for call in (sandbox.contexts.run("1", context="mine"), sandbox.contexts.delete("mine")):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(NotFound, match="was deleted"):
        await sandbox.contexts.run("1", context=context)
    await sandbox.contexts.create("mine")


async def test_another_engine_adopts_contexts_with_their_state(
    tmp_path: Path, layers: Path
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as first:
        sandbox = await first.create("box")
        kept = await sandbox.contexts.create(timeout=9, cwd="/tmp")
        died = await sandbox.contexts.create()
        await sandbox.contexts.run("x = 'kept'", context=kept)
        with pytest.raises(ProcessEnded):
            await sandbox.contexts.run("import os; os._exit(4)", context=died)
        await first.aclose(detach=True)
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as second:
        sandbox = second.sandbox("box")
        [found] = await sandbox.contexts.list()
        assert (found.id, found.row.timeout, found.row.cwd) == (kept.id, 9.0, "/tmp")
        execution = await sandbox.contexts.run("x", context=kept.id)
        assert (execution.text, execution.count) == ("'kept'", 2)
        with pytest.raises(ProcessEnded, match="exit code 4"):
            await sandbox.contexts.run("1", context=died.id)
        await second.aclose()
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as third:
        with pytest.raises(SandboxRestarted):
            await third.sandbox("box").contexts.run("1", context=kept.id)


async def test_ended_contexts_are_kept_up_to_a_count(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts_module, "MAX_ENDED", 1)
    for name in ("a", "b"):
        await sandbox.contexts.create(name)
        with pytest.raises(ProcessEnded):
            await sandbox.contexts.run("import os; os._exit(1)", context=name)

    async def forgotten() -> bool:
        rows = await sandbox._context.record.rows(ContextRow, "box")
        return [row.context_id for row in rows] == ["b"]

    await eventually(forgotten)
    directory = os.path.join(await sandbox.lifecycle.directory(), "run")
    left = [name for name in os.listdir(directory) if name.endswith(("~code.out", "~code.in"))]
    assert left == []
    with pytest.raises(NotFound):
        await sandbox.contexts.get("a")


async def test_invalid_options_are_refused(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts_module, "MAX_RUNNING", 1)
    monkeypatch.setattr(contexts_module, "LONGEST_CODE", 100)
    await sandbox.contexts.create("one")
    run = sandbox.contexts.run
    for call, kind, message in (
        (lambda: sandbox.contexts.create("one"), Conflict, "already has a code context 'one'"),
        (lambda: sandbox.contexts.create("two"), LimitReached, "1 code contexts"),
        (lambda: sandbox.contexts.create("../x"), InvalidOption, "context id"),
        (lambda: sandbox.contexts.create(language="ruby"), InvalidOption, "'ruby'"),
        (lambda: sandbox.contexts.create(timeout=-1), InvalidOption, "timeout"),
        (lambda: sandbox.contexts.create(env={"A=B": "x"}), InvalidOption, "environment"),
        (lambda: run("1", context="ghost"), NotFound, "'ghost'"),
        (lambda: run("1", context="one", language="js"), InvalidOption, "is for python"),
        (lambda: run(b"1"), InvalidOption, "a str, not bytes"),  # type: ignore[arg-type]
        (lambda: run("1" * 101), InvalidOption, "101 characters"),
        (lambda: run("1", timeout=0), InvalidOption, "timeout"),
    ):
        with pytest.raises(kind, match=message):
            await call()
    await sandbox.contexts.delete("one")
    with pytest.raises(PathNotFound):
        await sandbox.contexts.create("there", cwd="/no/such")
    assert await sandbox.contexts.list() == []


async def test_image_without_python_raises_with_a_hint(host: Host) -> None:
    sandbox = await host.create("box", env={"PATH": "/no/python/here"})
    with pytest.raises(Unsupported, match="no python3 or python") as caught:
        await sandbox.contexts.run("1")
    assert "Python 3.8" in caught.value.hint
    assert await sandbox._context.record.rows(ContextRow, "box") == []


async def test_failing_python_raises_with_its_output(host: Host) -> None:
    sandbox = await host.create("box", env={"PATH": "/workspace/bin:/usr/bin:/bin"})
    await sandbox.write_file("bin/python3", "#!/bin/sh\necho 'too old for this' >&2; exit 1\n")
    await sandbox.exec("chmod +x bin/python3")
    with pytest.raises(Unsupported, match="too old for this"):
        await sandbox.contexts.create()
    assert await sandbox.contexts.list() == []


async def test_kernel_does_not_import_files_of_the_user(sandbox: Sandbox) -> None:
    for name in ("json", "traceback", "signal", "select", "smokebox_kernel"):
        await sandbox.write_file(f"{name}.py", "raise RuntimeError('mine')")
    await sandbox.write_file("own.py", "value = 7")
    assert (await sandbox.contexts.run("import own; own.value")).text == "7"


async def test_long_output_is_kept_in_a_file(sandbox: Sandbox) -> None:
    execution = await sandbox.contexts.run("for n in range(300_000): print('line', n, 'x' * 60)")
    assert execution.truncated
    assert execution.stdout.startswith("line 0 xx")
    assert execution.stdout.endswith(f"line 299999 {'x' * 60}\n")
    assert execution.stdout_file is not None
    counted = await sandbox.exec(f"wc -l < {execution.stdout_file}")
    assert counted.stdout == "300000\n"


async def test_output_between_executions_comes_with_the_next(sandbox: Sandbox) -> None:
    code = (
        "import threading, time\ndef late():\n    time.sleep(0.1)\n    print('late')\n"
        "    open('late', 'w').close()\nthreading.Thread(target=late).start()"
    )
    assert (await sandbox.contexts.run(code)).stdout == ""
    await eventually(lambda: sandbox.exists("late"))
    assert (await sandbox.contexts.run("print('next')")).stdout == "late\nnext\n"


async def test_running_code_keeps_the_sandbox_awake_but_a_context_does_not(host: Host) -> None:
    sandbox = await host.create("box", sleep_after=0.5)
    context = await sandbox.contexts.create()
    assert (
        await sandbox.contexts.run("import time; time.sleep(1.2); 1", context=context)
    ).text == "1"

    async def asleep() -> bool:
        return (await sandbox.info() or pytest.fail()).status == "idle"

    await eventually(asleep)
    with pytest.raises(SandboxRestarted):
        await sandbox.contexts.run("1", context=context)
