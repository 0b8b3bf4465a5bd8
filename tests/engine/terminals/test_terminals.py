"""Terminals in a sandbox: real programs with input, viewers, sessions and options."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import pytest

from engine.terminals.viewer import open_viewer, output_of
from smokebox.engine.terminals.terminals import MAX_ENDED, MAX_RUNNING
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

EVERY_TIER = pytest.mark.usefixtures("every_tier")
# A prompt that does not occur in the input.
PROMPT = {"PS1": "<\\u:$?>", "TERM": "dumb", "HISTFILE": ""}
BASH = ["bash", "--norc"]


@EVERY_TIER
async def test_shell_runs_in_a_terminal_of_the_sandbox(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(cols=101, rows=33)
    async with open_viewer(terminal) as viewer:
        await viewer.send("echo $(tty) $(stty size) $TERM [$PWD] $0; exit 3\n")
        await viewer.expect("/dev/pts/0 33 101 xterm-256color [/workspace] /bin/bash")
        assert await terminal.wait(10) == 3
        await viewer.read_all()
    assert (terminal.running, terminal.exit_code) == (False, 3)


@EVERY_TIER
async def test_program_is_the_session_leader_of_its_terminal(sandbox: Sandbox) -> None:
    code = (
        "import os, json; print(json.dumps([os.getsid(0) == os.getpid(), os.tcgetpgrp(0) == "
        "os.getpgrp(), os.ttyname(0), os.isatty(1), os.isatty(2), os.fstat(0).st_uid]))"
    )
    terminal = await sandbox.terminals.create(command=["python3", "-c", code])
    found = json.loads(await output_of(terminal))
    assert found == [True, True, "/dev/pts/0", True, True, 0]


@pytest.mark.usefixtures("host_kernel_only")
async def test_program_can_open_dev_tty(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "echo hi >/dev/tty"])
    assert await output_of(terminal) == b"hi\r\n"


async def test_command_may_be_a_program_name(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command="sh", env=PROMPT)
    async with open_viewer(terminal) as viewer:
        await viewer.send("echo $0 $TERM\n")
        await viewer.expect("/sh dumb\r\n")
    assert terminal.command == ("sh",)


@EVERY_TIER
async def test_job_control_stops_resumes_and_interrupts(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=BASH, env=PROMPT)
    async with open_viewer(terminal) as viewer:
        await viewer.expect("<root:0>")
        # Input that arrives before bash starts cat is echoed differently.
        await viewer.send("echo star''ted; cat\n")
        await viewer.expect("started\r\n")
        await viewer.send("first\n")
        await viewer.expect("first\r\nfirst\r\n")
        await viewer.send(b"\x1a")
        await viewer.expect("Stopped")
        await viewer.expect("<root:148>")
        await viewer.send("fg\n")
        await viewer.expect("\r\ncat\r\n")
        await viewer.send("again\n")
        await viewer.expect("again\r\nagain\r\n")
        await viewer.send(b"\x03")
        await viewer.expect("<root:130>")
        await viewer.send("sleep 99 &\njobs\nkill %1; wait %1 2>/dev/null; echo $?\n")
        await viewer.expect("Running")
        await viewer.expect("\r\n143\r\n")


async def test_ctrl_d_ends_a_shell(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=BASH, env=PROMPT)
    async with open_viewer(terminal) as viewer:
        await viewer.expect("<root:0>")
        await viewer.send(b"\x04")
        assert await terminal.wait(10) == 0


async def test_python_prompt_is_interactive(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["python3", "-q"])
    async with open_viewer(terminal) as viewer:
        await viewer.expect(">>> ")
        await viewer.send("import sys; 6 * 7, sys.stdin.isatty()\n")
        await viewer.expect("(42, True)")
        await viewer.send("raise SystemExit(9)\n")
        assert await terminal.wait(10) == 9


@EVERY_TIER
async def test_resize_sends_sigwinch(sandbox: Sandbox) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print('now', *os.get_terminal_size()))\n"
        "print('at', *os.get_terminal_size(), flush=True)\n"
        "while True: time.sleep(9)"
    )
    terminal = await sandbox.terminals.create(command=["python3", "-uc", code])
    async with open_viewer(terminal) as viewer:
        await viewer.expect("at 80 24")
        await terminal.resize(cols=132, rows=50)
        await viewer.expect("now 132 50")
    assert (terminal.cols, terminal.rows) == (132, 50)


@pytest.mark.usefixtures("host_kernel_only")
async def test_unicode_input_and_output(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["cat"])
    async with open_viewer(terminal) as viewer:
        # Two characters of several bytes are erased again with one key each.
        await viewer.send("žluťoučký 日本語 🦊")
        await viewer.expect("🦊")
        await viewer.send("本é\x7f\x7f.\n")
        await viewer.expect("\r\nžluťoučký 日本語 🦊.\r\n")


@EVERY_TIER
async def test_raw_terminal_passes_every_byte(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 2000
    command = ["sh", "-c", "stty raw -echo; echo ready; exec head -c 512000"]
    terminal = await sandbox.terminals.create(command=command)
    async with open_viewer(terminal) as viewer:
        await viewer.expect("ready\n")
        async with asyncio.timeout(10):
            await viewer.send(data)
        output = await viewer.read_all()
    assert output.removeprefix(b"ready\n") == data
    assert await terminal.wait(10) == 0


async def test_single_viewer_of_a_fast_program_misses_nothing(sandbox: Sandbox) -> None:
    command = ["sh", "-c", "stty raw; seq 100000000 102500000"]
    terminal = await sandbox.terminals.create(command=command)
    count, last = 0, b""
    async with asyncio.timeout(18), terminal.view() as view:
        async for data in view:
            count += data.count(b"\n")
            last = (last + data)[-10:]
        assert (view.lost, count, last) == (0, 2500001, b"102500000\n")


@EVERY_TIER
async def test_several_viewers_get_the_same_output(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "read x; seq 20000"])
    async with open_viewer(terminal) as one, open_viewer(terminal) as other:
        await one.send("\n")
        assert await one.read_all() == await other.read_all()
    assert one.output.endswith(b"\r\n20000\r\n")


async def test_slow_viewer_counts_lost_bytes(sandbox: Sandbox) -> None:
    command = ["sh", "-c", "read x; seq 100000 299999"]
    terminal = await sandbox.terminals.create(command=command)
    async with terminal.view() as slow:
        async with open_viewer(terminal) as quick:
            await quick.send("\n")
            output = await quick.read_all()
        assert len(output) == 1_600_002
        rest = b"".join([data async for data in slow])
        assert slow.lost == len(output) - len(rest) > 0
    assert output.endswith(rest)


async def test_without_a_viewer_the_program_continues_and_the_end_is_kept(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create("t", command=["seq", "1000000"])
    assert await terminal.wait(15) == 0
    # gVisor passes output on more slowly than the program writes it.
    await output_of(terminal)
    kept = await output_of(await sandbox.terminals.get("t"))
    assert len(kept) == 256 << 10
    assert kept.endswith(b"\r\n999999\r\n1000000\r\n")


async def test_new_viewer_gets_a_replay(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=BASH, env=PROMPT)
    async with open_viewer(terminal) as viewer:
        await viewer.send("echo $((40 + 2))\n")
        await viewer.expect("\r\n42\r\n<root:0>")
    async with open_viewer(terminal) as viewer:
        await viewer.expect("\r\n42\r\n<root:0>")
        await viewer.send("exit\n")
        await viewer.read_all()


async def test_viewer_without_replay_gets_new_output_only(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "echo old; read x; echo new"])
    async with open_viewer(terminal) as viewer:
        await viewer.expect("old")
    async with terminal.view(replay=False) as view:
        await terminal.write("\n")
        output = b"".join([data async for data in view])
    assert output == b"\r\nnew\r\n"


async def test_exit_code_of_a_killed_program_has_its_signal(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "kill -9 $$"])
    assert await terminal.wait(10) == 137


async def test_wait_times_out(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sleep", "99"])
    with pytest.raises(DeadlineExceeded, match="did not end within"):
        await terminal.wait(0.05)
    with pytest.raises(InvalidOption):
        await terminal.wait(-1)


async def test_ended_terminal_refuses_input(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["true"])
    await terminal.wait(10)
    with pytest.raises(ProcessEnded, match="exit code 0"):
        await terminal.write("ls\n")
    with pytest.raises(ProcessEnded):
        await terminal.resize(cols=80, rows=24)
    await terminal.kill()


async def test_output_after_reopening_the_terminal_is_kept(sandbox: Sandbox) -> None:
    script = "exec 0<&- 1>&- 2>&-; sleep 0.2; echo back >/dev/pts/0"
    terminal = await sandbox.terminals.create(command=["sh", "-c", script])
    assert await output_of(terminal) == b"back\r\n"


async def test_terminal_starts_with_the_state_of_a_session(sandbox: Sandbox) -> None:
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


async def test_terminal_starts_with_an_unused_session(sandbox: Sandbox) -> None:
    await sandbox.create_session("idle", cwd="/usr/bin", env={"A": "1"})
    terminal = await sandbox.terminals.create(
        command=["sh", "-c", "pwd; echo $A; cd ..; pwd"], session="idle"
    )
    assert await output_of(terminal) == b"/usr/bin\r\n1\r\n/usr\r\n"
    other = await sandbox.terminals.create(command=["pwd"], session="idle", cwd="../lib")
    assert await output_of(other) == b"/usr/lib\r\n"
    with pytest.raises(NotFound, match="no session 'unknown'"):
        await sandbox.terminals.create(session="unknown")


@EVERY_TIER
async def test_terminal_belongs_to_its_user(sandbox: Sandbox) -> None:
    code = "import os; s = os.stat(os.ttyname(0)); print(s.st_uid == os.getuid(), s.st_mode & 0o46)"
    command = ["sh", "-c", f"id -un; python3 -c '{code}'; echo hi >$(tty); stty -echo"]
    if os.geteuid() != 0:
        with pytest.raises(Unsupported):
            await sandbox.terminals.create(command=command, user="nobody")
        return
    terminal = await sandbox.terminals.create(command=command, user="nobody")
    assert await output_of(terminal) == b"nobody\r\nTrue 0\r\nhi\r\n"
    assert await terminal.wait(10) == 0


async def test_terminals_are_found_by_id(sandbox: Sandbox) -> None:
    first = await sandbox.terminals.create("one", command=["cat"])
    second = await sandbox.terminals.create(command=["cat"])
    assert await sandbox.terminals.get("one") is first
    assert await sandbox.terminals.list() == [first, second]
    with pytest.raises(Conflict, match="already has a terminal 'one'"):
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
async def test_invalid_options_are_refused(sandbox: Sandbox, options: dict[str, object]) -> None:
    create = sandbox.terminals.create
    with pytest.raises(InvalidOption):
        await create(**options)  # type: ignore[arg-type]
    assert await sandbox.terminals.list() == []


async def test_failed_start_leaves_no_terminal(sandbox: Sandbox) -> None:
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
async def test_numbers_of_terminals_are_limited(sandbox: Sandbox) -> None:
    create = sandbox.terminals.create
    for n in range(MAX_RUNNING):
        await create(f"t{n}", command=["cat"])
    with pytest.raises(LimitReached, match=f"{MAX_RUNNING} terminals"):
        await create(command=["cat"])
    for n in range(MAX_ENDED + 2):
        await (await sandbox.terminals.get(f"t{n}")).kill()
    terminals = await sandbox.terminals.list()
    assert sum(not one.running for one in terminals) == MAX_ENDED
    with pytest.raises(NotFound):
        await sandbox.terminals.get("t0")
    assert (await sandbox.terminals.get("t2")).exit_code == 129
    await create("t0", command=["cat"])
