"""Code contexts in real sandboxes: their state, their ends, and what becomes of both."""

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

# Code that ends only when it is interrupted, and says in a file that it has begun.
ENDLESS = "import time\nopen('begun', 'w').close()\nwhile True: time.sleep(0.01)"


@pytest_asyncio.fixture
async def box(host: Host) -> Sandbox:
    return await host.create("box")


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(15):
        while not await condition():
            await asyncio.sleep(0.01)


async def begun(box: Sandbox) -> None:
    """Wait until `ENDLESS` runs."""
    await eventually(lambda: box.exists("begun"))
    await box.rm("begun")


async def test_names_stay_from_one_code_to_the_next(box: Sandbox) -> None:
    first = await box.contexts.run("import math\nx = 20\ndef f(): return x + 1")
    second = await box.contexts.run("x += 1\nprint(math.floor(1.5))\nf() * 2")
    assert (first.results, first.count, first.success) == ((), 1, True)
    assert (second.text, second.stdout, second.count) == ("44", "1\n", 2)
    assert second.results == (CodeResult(text="44", main=True),)


async def test_contexts_know_nothing_of_each_other(box: Sandbox) -> None:
    one, other = await box.contexts.create(), await box.contexts.create()
    await box.contexts.run("x = 1; import os", context=one)
    told = await box.contexts.run("x", context=other)
    assert told.error is not None
    assert (told.error.name, told.count) == ("NameError", 1)
    pids = {
        (await box.contexts.run("import os; os.getpid()", context=c)).text for c in (one, other)
    }
    assert len(pids) == 2


async def test_the_default_context_is_never_one_that_was_made(box: Sandbox) -> None:
    made = await box.contexts.create()
    await box.contexts.run("x = 'mine'", context=made)
    told = await box.contexts.run("x")
    assert told.error is not None
    assert told.context != made.id
    assert [one.info.default for one in await box.contexts.list()] == [False, True]
    assert (await box.contexts.run("x", context=made.id)).text == "'mine'"


async def test_a_context_begins_in_its_directory_with_its_variables(box: Sandbox) -> None:
    context = await box.contexts.create(cwd="/tmp", env={"A": "of the context"})
    told = await box.contexts.run("import os; os.getcwd(), os.environ['A']", context=context)
    assert told.text == "('/tmp', 'of the context')"
    assert context.info.cwd == "/tmp"


async def test_variables_of_one_call_end_with_it(box: Sandbox) -> None:
    context = await box.contexts.create(env={"A": "context"})
    code = "import os; os.environ.get('A'), os.environ.get('B')"
    during = await box.contexts.run(code, context=context, env={"A": "call", "B": "b"})
    after = await box.contexts.run(code, context=context)
    assert (during.text, after.text) == ("('call', 'b')", "('context', None)")


async def test_an_error_is_told_with_its_line_and_without_the_kernel(box: Sandbox) -> None:
    told = await box.contexts.run("def f():\n    raise ValueError('no')\n\nf()")
    error = told.error
    assert error is not None
    assert (error.name, error.message, error.line) == ("ValueError", "no", 2)
    assert error.traceback.splitlines()[0] == "Traceback (most recent call last):"
    assert "raise ValueError('no')" in error.traceback
    assert "smokebox" not in error.traceback
    later = await box.contexts.run("\n\nf()")
    assert later.error is not None
    assert later.error.line == 3
    broken = await box.contexts.run("x = 1\nif x\n")
    assert broken.error is not None
    assert (broken.error.name, broken.error.line) == ("SyntaxError", 2)


async def test_sys_exit_is_an_error_and_no_end(box: Sandbox) -> None:
    told = await box.contexts.run("import sys\nkept = 1\nsys.exit(3)")
    assert told.error is not None
    assert (told.error.name, told.error.message) == ("SystemExit", "3")
    assert (await box.contexts.run("kept")).text == "1"


async def test_output_of_all_kinds_comes_in_the_order_of_writing(box: Sandbox) -> None:
    code = (
        "import os, subprocess, sys\nprint('a')\nos.system('echo b')\nprint('c')\n"
        "subprocess.run(['echo', 'd'])\nos.write(1, b'e\\n')\nsys.stdout.buffer.write(b'f\\n')\n"
        "print('err', file=sys.stderr)"
    )
    told = await box.contexts.run(code)
    assert (told.stdout, told.stderr) == ("a\nb\nc\nd\ne\nf\n", "err\n")


async def test_bytes_that_are_no_text_come_as_replacements(box: Sandbox) -> None:
    code = (
        "import os\nos.write(1, '€'.encode()[:2])\nos.write(1, '€'.encode()[2:])\n"
        "os.write(1, b'\\xff\\0')"
    )
    assert (await box.contexts.run(code)).stdout == "€\ufffd\0"
    assert (await box.contexts.run("print('\\ud800', '\U0001f600')")).stdout == "\\ud800 😀\n"


async def test_events_come_as_they_happen(box: Sandbox) -> None:
    code = (
        "import os, time\nprint('first')\ndisplay('shown')\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n6 * 7"
    )
    events: list[object] = []
    async with box.contexts.stream(code) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == 2:
                await box.write_file("go", "")
    assert events[0] == OutputChunk("stdout", "first\n")
    assert events[1:] == [CodeResult(text="'shown'"), CodeResult(text="42", main=True)]
    assert (stream.execution.count, stream.execution.success) == (1, True)
    assert stream.execution.results == ()


async def test_a_timeout_interrupts_and_the_state_stays(box: Sandbox) -> None:
    await box.contexts.run("x = 1")
    told = await box.contexts.run(f"print('early')\n{ENDLESS}", timeout=0.5)
    assert (told.timed_out, told.context_ended, told.stdout) == (True, False, "early\n")
    assert told.error is not None
    assert told.error.name == "TimeoutError"
    assert "0.5 s" in told.error.message
    after = await box.contexts.run("x")
    assert (after.text, after.count, after.context) == ("1", 3, told.context)


async def test_a_timeout_of_the_context_is_for_calls_without_one(box: Sandbox) -> None:
    context = await box.contexts.create(timeout=0.3)
    assert (await box.contexts.run(ENDLESS, context=context)).timed_out
    code = "import time; time.sleep(0.5); 'done'"
    assert (await box.contexts.run(code, context=context, timeout=15)).text == "'done'"


async def test_code_that_writes_all_the_time_is_interrupted_too(box: Sandbox) -> None:
    told = await box.contexts.run("while True: print('x' * 100)", timeout=0.3)
    assert told.timed_out
    assert told.stdout.startswith("xxx")
    assert (await box.contexts.run("1")).text == "1"


async def test_code_that_heeds_no_interrupt_ends_with_its_context(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "INTERRUPT_SECONDS", 0.3)
    deaf = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('on')\n{ENDLESS}"
    context = await box.contexts.create()
    told = await box.contexts.run(deaf, context=context, timeout=0.3)
    assert (told.timed_out, told.context_ended, told.stdout) == (True, True, "on\n")
    assert told.error is not None
    with pytest.raises(ProcessEnded, match="did not heed an interrupt"):
        await box.contexts.run("1", context=context)
    # The default one is made anew.
    assert (await box.contexts.run(deaf, timeout=0.3)).context_ended
    assert (await box.contexts.run("'fresh'")).count == 1


async def test_whoever_stops_waiting_interrupts_the_code(box: Sandbox) -> None:
    await box.contexts.run("x = 'kept'")
    running = asyncio.create_task(box.contexts.run(ENDLESS))
    await begun(box)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await box.contexts.run("x")).text == "'kept'"


async def test_leaving_a_stream_interrupts_the_code(box: Sandbox) -> None:
    async with box.contexts.stream(f"print('on')\n{ENDLESS}") as stream:
        async for _ in stream:
            break
    assert (await box.contexts.run("'next'")).text == "'next'"
    with pytest.raises(RuntimeError):
        _ = stream.execution


async def test_an_interrupt_reaches_what_the_code_waits_for(box: Sandbox) -> None:
    for code in ("import os; os.system('sleep 1000')", "import asyncio\nawait asyncio.sleep(1000)"):
        told = await box.contexts.run(code, timeout=0.3)
        assert (told.timed_out, told.context_ended) == (True, False)
    assert (await box.exec("pgrep -c sleep")).stdout == "0\n"


async def test_code_of_one_context_runs_in_the_order_of_asking(box: Sandbox) -> None:
    await box.contexts.run("seen = []")
    codes = [f"import time; time.sleep(0.02); seen.append({n})" for n in range(5)]
    await asyncio.gather(*(box.contexts.run(code) for code in codes))
    assert (await box.contexts.run("seen")).results[0].json == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("import os; os._exit(3)", 3, "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", 139, "signal 11"),
        ("import os; os.kill(os.getpid(), 9)", 137, "killed"),
    ],
)
async def test_a_context_that_dies_is_an_error_also_for_the_next_call(
    box: Sandbox, code: str, exit_code: int, words: str
) -> None:
    context = await box.contexts.create()
    for attempt in (code, "1"):
        with pytest.raises(ProcessEnded, match=words) as caught:
            await box.contexts.run(attempt, context=context)
        assert caught.value.fields == {"process": context.id, "exit_code": exit_code}
    assert await box.contexts.list() == []


async def test_a_context_without_memory_dies_alone(host: Host) -> None:
    box = await host.create("box", limits={"memory": "256MiB"})
    context = await box.contexts.create()
    if (await box.info() or pytest.fail()).enforcement == "rlimits":
        pytest.skip("this host cannot limit the memory of a whole sandbox")
    code = "held = []\nwhile True: held.append(bytearray(b'x') * (1 << 24))"
    with pytest.raises(ProcessEnded, match="out of memory"):
        await box.contexts.run(code, context=context)
    assert (await box.contexts.run("1")).text == "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give other ids")
async def test_code_runs_as_the_user_of_its_sandbox(host: Host) -> None:
    box = await host.create("box", user="user")
    assert (await box.contexts.run("import os; os.getuid()")).text == "1000"
    assert (await box.contexts.run("process.getuid()", language="js")).text == "1000"


async def test_what_was_written_before_a_death_was_given(box: Sandbox) -> None:
    heard = []
    with pytest.raises(ProcessEnded):
        async with box.contexts.stream(
            "import os\nprint('last', flush=True)\nos._exit(1)"
        ) as stream:
            async for event in stream:
                heard += [event]
    assert heard == [OutputChunk("stdout", "last\n")]


async def test_sleep_ends_contexts_and_they_say_so(box: Sandbox) -> None:
    context = await box.contexts.create()
    await box.contexts.run("x = 1")
    await box.sleep()
    assert await box.contexts.list() == []
    assert (await box.info() or pytest.fail()).status == "idle"
    with pytest.raises(SandboxRestarted, match="it fell asleep"):
        await box.contexts.run("1", context=context.id)
    told = await box.contexts.run("x")
    assert told.error is not None
    assert told.count == 1


async def test_sleep_and_destroy_end_code_that_runs(box: Sandbox) -> None:
    for end in (box.sleep, box.destroy):
        running = asyncio.create_task(box.contexts.run(ENDLESS))
        await begun(box)
        await end()
        with pytest.raises(SandboxGone):
            await running


async def test_a_deleted_context_is_gone_with_its_processes(box: Sandbox) -> None:
    context = await box.contexts.create("mine")
    await box.contexts.run("import subprocess; subprocess.Popen(['sleep', '1000'])", context="mine")
    running = asyncio.create_task(box.contexts.run(ENDLESS, context=context))
    await begun(box)
    await box.contexts.delete("mine")
    with pytest.raises(NotFound, match="was deleted"):
        await running
    assert (await box.exec("pgrep -c sleep")).stdout == "0\n"
    for call in (box.contexts.run("1", context="mine"), box.contexts.delete("mine")):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(NotFound, match="was deleted"):
        await box.contexts.run("1", context=context)
    await box.contexts.create("mine")


async def test_another_engine_finds_contexts_again_with_their_state(
    tmp_path: Path, layers: Path
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as first:
        box = await first.create("box")
        kept = await box.contexts.create(timeout=9, cwd="/tmp")
        died = await box.contexts.create()
        await box.contexts.run("x = 'kept'", context=kept)
        with pytest.raises(ProcessEnded):
            await box.contexts.run("import os; os._exit(4)", context=died)
        await first.aclose(detach=True)
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as second:
        box = second.sandbox("box")
        [found] = await box.contexts.list()
        assert (found.id, found.row.timeout, found.row.cwd) == (kept.id, 9.0, "/tmp")
        told = await box.contexts.run("x", context=kept.id)
        assert (told.text, told.count) == ("'kept'", 2)
        with pytest.raises(ProcessEnded, match="exit code 4"):
            await box.contexts.run("1", context=died.id)
        await second.aclose()
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as third:
        with pytest.raises(SandboxRestarted):
            await third.sandbox("box").contexts.run("1", context=kept.id)


async def test_only_so_many_of_the_ended_are_remembered(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts_module, "MOST_ENDED", 1)
    for name in ("a", "b"):
        await box.contexts.create(name)
        with pytest.raises(ProcessEnded):
            await box.contexts.run("import os; os._exit(1)", context=name)

    async def forgotten() -> bool:
        rows = await box._context.record.rows(ContextRow, "box")
        return [row.context_id for row in rows] == ["b"]

    await eventually(forgotten)
    directory = os.path.join(await box.life.directory(), "run")
    left = [name for name in os.listdir(directory) if name.endswith(("~code.out", "~code.in"))]
    assert left == []
    with pytest.raises(NotFound):
        await box.contexts.get("a")


async def test_what_cannot_be_is_refused(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts_module, "MOST_RUNNING", 1)
    monkeypatch.setattr(contexts_module, "LONGEST_CODE", 100)
    await box.contexts.create("one")
    run = box.contexts.run
    for call, kind, words in (
        (lambda: box.contexts.create("one"), Conflict, "has a code context 'one'"),
        (lambda: box.contexts.create("two"), LimitReached, "1 code contexts"),
        (lambda: box.contexts.create("../x"), InvalidOption, "context id"),
        (lambda: box.contexts.create(language="ruby"), InvalidOption, "'ruby'"),
        (lambda: box.contexts.create(timeout=-1), InvalidOption, "timeout"),
        (lambda: box.contexts.create(env={"A=B": "x"}), InvalidOption, "environment"),
        (lambda: run("1", context="ghost"), NotFound, "'ghost'"),
        (lambda: run("1", context="one", language="js"), InvalidOption, "is for python"),
        (lambda: run(b"1"), InvalidOption, "a str, not bytes"),  # type: ignore[arg-type]
        (lambda: run("1" * 101), InvalidOption, "101 characters"),
        (lambda: run("1", timeout=0), InvalidOption, "timeout"),
    ):
        with pytest.raises(kind, match=words):
            await call()
    await box.contexts.delete("one")
    with pytest.raises(PathNotFound):
        await box.contexts.create("there", cwd="/no/such")
    assert await box.contexts.list() == []


async def test_an_image_without_python_says_what_to_do(host: Host) -> None:
    box = await host.create("box", env={"PATH": "/no/python/here"})
    with pytest.raises(Unsupported, match="no python3") as caught:
        await box.contexts.run("1")
    assert "Python 3.8" in caught.value.hint
    assert await box._context.record.rows(ContextRow, "box") == []


async def test_a_python_that_does_not_run_the_kernel_says_why(host: Host) -> None:
    box = await host.create("box", env={"PATH": "/workspace/bin:/usr/bin:/bin"})
    await box.write_file("bin/python3", "#!/bin/sh\necho 'too old for this' >&2; exit 1\n")
    await box.exec("chmod +x bin/python3")
    with pytest.raises(Unsupported, match="too old for this"):
        await box.contexts.create()
    assert await box.contexts.list() == []


async def test_files_of_the_user_are_no_modules_of_the_kernel(box: Sandbox) -> None:
    for name in ("json", "traceback", "signal", "select", "smokebox_kernel"):
        await box.write_file(f"{name}.py", "raise RuntimeError('mine')")
    await box.write_file("own.py", "value = 7")
    assert (await box.contexts.run("import own; own.value")).text == "7"


async def test_much_output_is_kept_in_a_file(box: Sandbox) -> None:
    told = await box.contexts.run("for n in range(300_000): print('line', n, 'x' * 60)")
    assert told.truncated
    assert told.stdout.startswith("line 0 xx")
    assert told.stdout.endswith(f"line 299999 {'x' * 60}\n")
    assert told.stdout_file is not None
    counted = await box.exec(f"wc -l < {told.stdout_file}")
    assert counted.stdout == "300000\n"


async def test_what_threads_write_between_codes_comes_with_the_next(box: Sandbox) -> None:
    code = (
        "import threading, time\ndef late():\n    time.sleep(0.1)\n    print('late')\n"
        "    open('late', 'w').close()\nthreading.Thread(target=late).start()"
    )
    assert (await box.contexts.run(code)).stdout == ""
    await eventually(lambda: box.exists("late"))
    assert (await box.contexts.run("print('next')")).stdout == "late\nnext\n"


async def test_a_context_does_not_keep_its_sandbox_awake_and_code_does(host: Host) -> None:
    box = await host.create("box", sleep_after=0.5)
    context = await box.contexts.create()
    assert (await box.contexts.run("import time; time.sleep(1.2); 1", context=context)).text == "1"

    async def asleep() -> bool:
        return (await box.info() or pytest.fail()).status == "idle"

    await eventually(asleep)
    with pytest.raises(SandboxRestarted):
        await box.contexts.run("1", context=context)
