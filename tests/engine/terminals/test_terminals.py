"""Terminals in a sandbox: real programs that are typed to, watched and ended."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import pytest

from engine.terminals.screen import looking, output_of
from smokebox.engine.terminals.terminals import MOST_ENDED, MOST_RUNNING
from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    LimitReached,
    NotFound,
    PathNotFound,
    ProcessEnded,
    Unsupported,
)

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

BOTH = pytest.mark.usefixtures("gvisor_too")
# A prompt that is in no line that is typed.
PROMPT = {"PS1": "<\\u:$?>", "TERM": "dumb", "HISTFILE": ""}
BASH = ["bash", "--norc"]


@BOTH
async def test_a_shell_has_a_terminal_of_the_sandbox(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(cols=101, rows=33)
    async with looking(terminal) as screen:
        await screen.type("echo $(tty) $(stty size) $TERM [$PWD] $0; exit 3\n")
        await screen.shows("/dev/pts/0 33 101 xterm-256color [/workspace] /bin/bash")
        assert await terminal.wait(10) == 3
        await screen.over()
    assert (terminal.running, terminal.exit_code) == (False, 3)


@BOTH
async def test_the_program_leads_a_session_of_that_terminal(sandbox: Sandbox) -> None:
    code = (
        "import os, json; print(json.dumps([os.getsid(0) == os.getpid(), os.tcgetpgrp(0) == "
        "os.getpgrp(), os.ttyname(0), os.isatty(1), os.isatty(2), os.fstat(0).st_uid]))"
    )
    terminal = await sandbox.terminals.create(command=["python3", "-c", code])
    found = json.loads(await output_of(terminal))
    assert found == [True, True, "/dev/pts/0", True, True, 0]


@pytest.mark.usefixtures("kernel_of_the_host")
async def test_a_program_can_open_its_controlling_terminal(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "echo hi >/dev/tty"])
    assert await output_of(terminal) == b"hi\r\n"


async def test_a_shell_can_be_named(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command="sh", env=PROMPT)
    async with looking(terminal) as screen:
        await screen.type("echo $0 $TERM\n")
        await screen.shows("/sh dumb\r\n")
    assert terminal.command == ("sh",)


@BOTH
async def test_job_control_stops_resumes_and_interrupts(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=BASH, env=PROMPT)
    async with looking(terminal) as screen:
        await screen.shows("<root:0>")
        # What is typed while bash still has the line is shown otherwise.
        await screen.type("echo be''gun; cat\n")
        await screen.shows("begun\r\n")
        await screen.type("first\n")
        await screen.shows("first\r\nfirst\r\n")
        await screen.type(b"\x1a")
        await screen.shows("Stopped")
        await screen.shows("<root:148>")
        await screen.type("fg\n")
        await screen.shows("\r\ncat\r\n")
        await screen.type("again\n")
        await screen.shows("again\r\nagain\r\n")
        await screen.type(b"\x03")
        await screen.shows("<root:130>")
        await screen.type("sleep 99 &\njobs\nkill %1; wait %1 2>/dev/null; echo $?\n")
        await screen.shows("Running")
        await screen.shows("\r\n143\r\n")


async def test_end_of_input_ends_a_shell(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=BASH, env=PROMPT)
    async with looking(terminal) as screen:
        await screen.shows("<root:0>")
        await screen.type(b"\x04")
        assert await terminal.wait(10) == 0


async def test_a_python_prompt_answers(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["python3", "-q"])
    async with looking(terminal) as screen:
        await screen.shows(">>> ")
        await screen.type("import sys; 6 * 7, sys.stdin.isatty()\n")
        await screen.shows("(42, True)")
        await screen.type("raise SystemExit(9)\n")
        assert await terminal.wait(10) == 9


@BOTH
async def test_a_program_is_told_of_another_size(sandbox: Sandbox) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print('now', *os.get_terminal_size()))\n"
        "print('at', *os.get_terminal_size(), flush=True)\n"
        "while True: time.sleep(9)"
    )
    terminal = await sandbox.terminals.create(command=["python3", "-uc", code])
    async with looking(terminal) as screen:
        await screen.shows("at 80 24")
        await terminal.resize(cols=132, rows=50)
        await screen.shows("now 132 50")
    assert (terminal.cols, terminal.rows) == (132, 50)


@pytest.mark.usefixtures("kernel_of_the_host")
async def test_text_of_every_script_goes_both_ways(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["cat"])
    async with looking(terminal) as screen:
        # The last two are typed and taken back again: each is one key, and several bytes.
        await screen.type("žluťoučký 日本語 🦊")
        await screen.shows("🦊")
        await screen.type("本é\x7f\x7f.\n")
        await screen.shows("\r\nžluťoučký 日本語 🦊.\r\n")


@BOTH
async def test_a_raw_terminal_passes_every_byte(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 2000
    words = ["sh", "-c", "stty raw -echo; echo ready; exec head -c 512000"]
    terminal = await sandbox.terminals.create(command=words)
    async with looking(terminal) as screen:
        await screen.shows("ready\n")
        async with asyncio.timeout(10):
            await screen.type(data)
        seen = await screen.over()
    assert seen.removeprefix(b"ready\n") == data
    assert await terminal.wait(10) == 0


async def test_one_viewer_of_a_fast_program_loses_nothing(sandbox: Sandbox) -> None:
    words = ["sh", "-c", "stty raw; seq 100000000 102500000"]
    terminal = await sandbox.terminals.create(command=words)
    count, last = 0, b""
    async with asyncio.timeout(18), terminal.view() as view:
        async for data in view:
            count += data.count(b"\n")
            last = (last + data)[-10:]
        assert (view.lost, count, last) == (0, 2500001, b"102500000\n")


@BOTH
async def test_several_viewers_see_the_same(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "read x; seq 20000"])
    async with looking(terminal) as one, looking(terminal) as other:
        await one.type("\n")
        assert await one.over() == await other.over()
    assert one.seen.endswith(b"\r\n20000\r\n")


async def test_a_slow_viewer_is_told_what_it_has_missed(sandbox: Sandbox) -> None:
    words = ["sh", "-c", "read x; seq 100000 299999"]
    terminal = await sandbox.terminals.create(command=words)
    async with terminal.view() as slow:
        async with looking(terminal) as quick:
            await quick.type("\n")
            seen = await quick.over()
        assert len(seen) == 1_600_002
        late = b"".join([data async for data in slow])
        assert slow.lost == len(seen) - len(late) > 0
    assert seen.endswith(late)


async def test_without_a_viewer_nothing_waits_and_the_end_is_kept(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create("t", command=["seq", "1000000"])
    assert await terminal.wait(15) == 0
    # gVisor is slower to give what was written than the program was to write it.
    await output_of(terminal)
    kept = await output_of(await sandbox.terminals.get("t"))
    assert len(kept) == 256 << 10
    assert kept.endswith(b"\r\n999999\r\n1000000\r\n")


async def test_a_viewer_who_comes_back_sees_what_was(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=BASH, env=PROMPT)
    async with looking(terminal) as screen:
        await screen.type("echo $((40 + 2))\n")
        await screen.shows("\r\n42\r\n<root:0>")
    async with looking(terminal) as screen:
        await screen.shows("\r\n42\r\n<root:0>")
        await screen.type("exit\n")
        await screen.over()


async def test_a_viewer_can_do_without_what_was(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "echo old; read x; echo new"])
    async with looking(terminal) as screen:
        await screen.shows("old")
    async with terminal.view(replay=False) as view:
        await terminal.write("\n")
        seen = b"".join([data async for data in view])
    assert seen == b"\r\nnew\r\n"


async def test_a_killed_program_has_the_number_of_its_signal(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "kill -9 $$"])
    assert await terminal.wait(10) == 137


async def test_waiting_has_a_deadline(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sleep", "99"])
    with pytest.raises(DeadlineExceeded, match="did not end within"):
        await terminal.wait(0.05)
    with pytest.raises(InvalidOption):
        await terminal.wait(-1)


async def test_what_has_ended_takes_nothing_more(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["true"])
    await terminal.wait(10)
    with pytest.raises(ProcessEnded, match="exit code 0"):
        await terminal.write("ls\n")
    with pytest.raises(ProcessEnded):
        await terminal.resize(cols=80, rows=24)
    await terminal.kill()


async def test_a_program_that_reopens_its_terminal_is_still_seen(sandbox: Sandbox) -> None:
    script = "exec 0<&- 1>&- 2>&-; sleep 0.2; echo back >/dev/pts/0"
    terminal = await sandbox.terminals.create(command=["sh", "-c", script])
    assert await output_of(terminal) == b"back\r\n"


async def test_a_terminal_takes_over_what_a_session_exports(sandbox: Sandbox) -> None:
    session = await sandbox.create_session("work", env={"FIRST": "a b"})
    script = 'mkdir -p /tmp/d; cd /tmp/d; export Q=$\'tab\\there "$x" é\\nline\' T="\'"; hidden=1'
    await session.exec(script)
    code = "import os, json; print(json.dumps([os.getcwd(), dict(os.environ)]))"
    terminal = await sandbox.terminals.create(
        command=["python3", "-c", code], session="work", env={"MORE": "1"}
    )
    cwd, env = json.loads(await output_of(terminal))
    assert cwd == "/tmp/d" == env["PWD"]
    assert (env["FIRST"], env["T"], env["MORE"]) == ("a b", "'", "1")
    assert (env["Q"], env["TERM"]) == ('tab\there "$x" é\nline', "xterm-256color")
    assert "hidden" not in env


async def test_a_session_that_did_nothing_has_a_beginning_too(sandbox: Sandbox) -> None:
    await sandbox.create_session("idle", cwd="/usr/bin", env={"A": "1"})
    terminal = await sandbox.terminals.create(
        command=["sh", "-c", "pwd; echo $A; cd ..; pwd"], session="idle"
    )
    assert await output_of(terminal) == b"/usr/bin\r\n1\r\n/usr\r\n"
    other = await sandbox.terminals.create(command=["pwd"], session="idle", cwd="../lib")
    assert await output_of(other) == b"/usr/lib\r\n"
    with pytest.raises(NotFound, match="no session 'nobody'"):
        await sandbox.terminals.create(session="nobody")


@BOTH
async def test_another_user_owns_its_terminal(sandbox: Sandbox) -> None:
    code = "import os; s = os.stat(os.ttyname(0)); print(s.st_uid == os.getuid(), s.st_mode & 0o46)"
    words = ["sh", "-c", f"id -un; python3 -c '{code}'; echo hi >$(tty); stty -echo"]
    if os.geteuid() != 0:
        with pytest.raises(Unsupported):
            await sandbox.terminals.create(command=words, user="nobody")
        return
    terminal = await sandbox.terminals.create(command=words, user="nobody")
    assert await output_of(terminal) == b"nobody\r\nTrue 0\r\nhi\r\n"
    assert await terminal.wait(10) == 0


async def test_terminals_are_found_by_their_ids(sandbox: Sandbox) -> None:
    first = await sandbox.terminals.create("one", command=["cat"])
    second = await sandbox.terminals.create(command=["cat"])
    assert await sandbox.terminals.get("one") is first
    assert await sandbox.terminals.list() == [first, second]
    with pytest.raises(Conflict, match="'one' already"):
        await sandbox.terminals.create("one")
    await sandbox.terminals.close("one")
    assert (first.running, first.exit_code) == (False, 129)
    with pytest.raises(NotFound, match="no terminal 'one'"):
        await sandbox.terminals.get("one")
    with pytest.raises(NotFound):
        await sandbox.terminals.close("one")
    await sandbox.terminals.create("one", command=["cat"])


@pytest.mark.parametrize(
    "options",
    [
        {"id": "a/b"},
        {"cols": 0},
        {"rows": 10_001},
        {"cols": True},
        {"rows": "24"},
        {"command": ""},
        {"command": "ls -l"},
        {"command": []},
        {"command": 7},
        {"env": {"A": 1}},
        {"user": "no such:user"},
    ],
)
async def test_bad_options_are_refused(sandbox: Sandbox, options: dict[str, object]) -> None:
    create = sandbox.terminals.create
    with pytest.raises(InvalidOption):
        await create(**options)  # type: ignore[arg-type]
    assert await sandbox.terminals.list() == []


async def test_what_cannot_be_started_leaves_no_terminal(sandbox: Sandbox) -> None:
    with pytest.raises(PathNotFound, match="no program 'nope'"):
        await sandbox.terminals.create("t", command="nope")
    with pytest.raises(PathNotFound, match="/nowhere"):
        await sandbox.terminals.create("t", cwd="/nowhere")
    with pytest.raises(PermissionError):
        await sandbox.terminals.create("t", command="/etc/passwd")
    assert await sandbox.terminals.list() == []
    result = await sandbox.exec("ls /dev/pts")
    assert "0" not in result.stdout.split()


@pytest.mark.timeout(60)
async def test_there_are_bounds_on_how_many_there_are(sandbox: Sandbox) -> None:
    create = sandbox.terminals.create
    for n in range(MOST_RUNNING):
        await create(f"t{n}", command=["cat"])
    with pytest.raises(LimitReached, match=f"{MOST_RUNNING} terminals"):
        await create(command=["cat"])
    for n in range(MOST_ENDED + 2):
        await (await sandbox.terminals.get(f"t{n}")).kill()
    terminals = await sandbox.terminals.list()
    assert sum(not one.running for one in terminals) == MOST_ENDED
    with pytest.raises(NotFound):
        await sandbox.terminals.get("t0")
    assert (await sandbox.terminals.get("t2")).exit_code == 129
    await create("t0", command=["cat"])
