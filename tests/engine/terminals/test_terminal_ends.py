"""Ends of terminals: by their program, by kill, with the sandbox, and with the engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.leftovers import sandbox_pids, wait_until_empty
from engine.terminals.viewer import open_viewer, output_of
from short_directory import short_directory
from smokebox.engine.host import Host
from smokebox.engine.jail.terminal_supervisor import HANGUP_SECONDS
from smokebox.errors import NotFound, ProcessEnded, SandboxGone
from unprivileged import LIBRARIES, NOBODY, as_nobody, rerun_as_nobody

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

EVERY_TIER = pytest.mark.usefixtures("every_tier")
# It and its children ignore signals.
STUBBORN = """
trap '' HUP TERM INT
setsid sleep 9991 &
nohup sleep 9992 >/dev/null 2>&1 &
(trap '' HUP; sleep 9993) &
echo ready
while true; do sleep 9994; done
"""

# Not a shell: one that runs commands in a loop missed one of 96 hangups.
HANDLES_HANGUP = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
print("ready", flush=True)
signal.sigwait({signal.SIGHUP})
print("handling", flush=True)
time.sleep(0.5)
print("handled", flush=True)
sys.exit(4)
"""


async def sleep_processes(sandbox: Sandbox) -> str:
    result = await sandbox.exec(["sh", "-c", "ps -eo args | grep '[s]leep 999'"])
    return result.stdout


@EVERY_TIER
async def test_kill_ends_all_processes_of_a_terminal(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["bash", "-c", STUBBORN])
    async with open_viewer(terminal) as viewer:
        await viewer.expect("ready")
        await terminal.kill()
        await viewer.read_all()
    assert (terminal.running, terminal.exit_code) == (False, 137)
    assert await sleep_processes(sandbox) == ""


@EVERY_TIER
async def test_background_processes_end_with_the_shell(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create("t", command=["bash", "--norc"])
    async with open_viewer(terminal) as viewer:
        await viewer.send("setsid sleep 9991 & nohup sleep 9992 & disown -a; exit 5\n")
        assert await terminal.wait(10) == 5
        await viewer.read_all()
    await sandbox.terminals.close("t")
    assert await sleep_processes(sandbox) == ""


async def test_program_can_handle_the_hangup(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["python3", "-c", HANDLES_HANGUP])
    async with open_viewer(terminal) as viewer:
        await viewer.expect("ready")
        await terminal.kill()
        output = await viewer.read_all()
    assert (terminal.exit_code, b"handled" in output) == (4, True)


async def test_program_without_cpu_can_handle_the_hangup(sandbox: Sandbox) -> None:
    """A sandbox that gets no CPU for a while, as on a busy host, does not use up the period."""
    terminal = await sandbox.terminals.create(command=["python3", "-c", HANDLES_HANGUP])
    async with open_viewer(terminal) as viewer, sandbox.lifecycle.use() as run:
        await viewer.expect("ready")
        killing = asyncio.create_task(terminal.kill())
        await viewer.expect("handling")
        await run.jail.freeze()
        await asyncio.sleep(HANGUP_SECONDS + 0.5)
        await run.jail.thaw()
        await killing
    assert terminal.exit_code == 4


async def test_killing_a_terminal_does_not_affect_others(sandbox: Sandbox) -> None:
    first = await sandbox.terminals.create(command=["sleep", "9991"])
    second = await sandbox.terminals.create(command=["cat"])
    await first.kill()
    async with open_viewer(second) as viewer:
        await viewer.send("here\n")
        await viewer.expect("here\r\nhere\r\n")


async def test_program_that_kills_its_supervisor_ends(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(
        command=["sh", "-c", "read x; kill -9 $PPID; sleep 9991"]
    )
    await terminal.write("\n")
    assert await terminal.wait(10) == 137
    assert await sleep_processes(sandbox) == ""


async def test_other_writers_do_not_keep_a_terminal_open(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "echo ready; read x"])
    async with open_viewer(terminal) as viewer:
        await viewer.expect("ready")
        await sandbox.start_process("exec yes >/dev/pts/0 2>/dev/null", process_id="other")
        await viewer.expect("y\r\ny\r\n")
        await viewer.send("\n")
        assert await terminal.wait(10) == 0
        await viewer.read_all()
    await sandbox.processes.kill("other")


@EVERY_TIER
@pytest.mark.parametrize("end", ["sleep", "destroy"])
async def test_end_of_the_sandbox_is_reported_to_viewers(sandbox: Sandbox, end: str) -> None:
    terminal = await sandbox.terminals.create("t", command=["bash", "-c", STUBBORN])

    async def follow() -> bytes:
        output = b""
        with pytest.raises(SandboxGone) as caught:
            async with terminal.view() as view:
                async for data in view:
                    output += data
                    ready.set()
        assert caught.value.fields["sandbox_id"] == "box"
        return output

    ready = asyncio.Event()
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        followers = [group.create_task(follow()) for _ in range(2)]
        waiter = group.create_task(expect_gone(terminal.wait(10)))
        await ready.wait()
        await getattr(sandbox, end)()
    assert [follower.result() for follower in followers] == [b"ready\r\n"] * 2
    assert waiter.done()
    assert (terminal.running, terminal.exit_code) == (False, 137)
    with pytest.raises(SandboxGone):
        await terminal.write("x")
    if end == "sleep":
        assert await sandbox.terminals.get("t") is terminal
    else:
        with pytest.raises(NotFound):
            await sandbox.terminals.get("t")


async def expect_gone(waiting: asyncio.Future[int] | object) -> None:
    with pytest.raises(SandboxGone):
        await waiting  # type: ignore[misc]


async def test_sleep_hangs_up_terminals_first(sandbox: Sandbox) -> None:
    script = (
        "trap 'echo bye >/workspace/note; exit' HUP; echo ready; while true; do sleep 0.1; done"
    )
    # On a busy machine the grace period of two seconds may be too short.
    for _ in range(3):
        terminal = await sandbox.terminals.create(command=["bash", "-c", script])
        async with open_viewer(terminal) as viewer:
            await viewer.expect("ready")
        await sandbox.sleep()
        if await sandbox.exists("note"):
            break
    assert await sandbox.read_file("note") == "bye\n"


async def test_view_keeps_the_sandbox_awake_but_a_terminal_does_not(host: Host) -> None:
    sandbox = await host.create("brief", sleep_after=0.3)
    terminal = await sandbox.terminals.create(command=["sh", "-c", "sleep 1; echo done; cat"])
    async with open_viewer(terminal) as viewer:
        await viewer.expect("done")
    assert terminal.running
    async with asyncio.timeout(10):
        while terminal.running:
            await asyncio.sleep(0.02)
    info = await sandbox.info()
    assert info is not None and info.status == "idle"
    with pytest.raises(SandboxGone):
        await output_of(terminal)


@pytest.mark.parametrize("detach", [True, False])
async def test_terminals_end_with_the_engine(tmp_path: Path, layers: Path, detach: bool) -> None:
    home = tmp_path / "home"
    host = await Host.open(home, pool=0, images=layers)
    terminal = await (await host.create("box")).terminals.create("t", command=["sh", "-c", "cat"])

    async def follow() -> None:
        with pytest.raises(SandboxGone):
            await output_of(terminal)

    async with asyncio.TaskGroup() as group:
        group.create_task(follow())
        await asyncio.sleep(0)
        await host.aclose(detach=detach)
    async with await Host.open(home, pool=0, images=layers) as host:
        sandbox = host.sandbox("box")
        with pytest.raises(NotFound):
            await sandbox.terminals.get("t")
        listed = await sandbox.exec(["ps", "-eo", "comm"])
        assert "cat" not in listed.stdout.split()


async def test_cancelled_start_leaves_nothing(sandbox: Sandbox) -> None:
    await sandbox.wake()
    for wait in (0.0, 0.001, 0.003, 0.006, 0.01):
        start = sandbox.terminals.create("t", command=["sleep", "9991"])
        try:
            async with asyncio.timeout(wait):
                await start
        except TimeoutError:
            assert await sandbox.terminals.list() == []
        else:
            await sandbox.terminals.close("t")
    async with asyncio.timeout(10):
        while await sleep_processes(sandbox):
            await asyncio.sleep(0.05)


async def test_kill_interrupts_a_blocked_write(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "stty raw; sleep 9991"])
    writing = asyncio.create_task(terminal.write(b"x" * 1_000_000))
    await asyncio.wait([writing], timeout=0.3)
    assert not writing.done()
    await terminal.kill()
    with pytest.raises(ProcessEnded):
        await writing


CRASH = """
import asyncio, os, signal, sys
from smokebox.engine.host import Host

async def main(home):
    host = await Host.open(home + "/home", pool=0, images=home + "/layers")
    sandbox = await host.create("box")
    terminal = await sandbox.terminals.create("t", command=["bash", "-c", sys.argv[2]])
    async with terminal.view() as view:
        output = b""
        while b"ready" not in output:
            output += await anext(view)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1]))
"""
CHECK = """
import asyncio, sys
from smokebox.engine.host import Host
from smokebox.errors import NotFound

async def main(home):
    async with await Host.open(home + "/home", pool=0, images=home + "/layers") as host:
        sandbox = host.sandbox("box")
        try:
            await sandbox.terminals.get("t")
        except NotFound:
            terminal = await sandbox.terminals.create("t", command=["tty"])
            async with terminal.view() as view:
                print(b"".join([data async for data in view]).decode().strip())
        await sandbox.destroy()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ordinary", [False, True], ids=["current-user", "nobody"])
def test_no_process_outlives_a_killed_engine(ordinary: bool) -> None:
    if ordinary and os.geteuid() != 0:
        pytest.skip("another user needs root")
    python = [*as_nobody(), "/usr/bin/python3", "-c"] if ordinary else [sys.executable, "-c"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": LIBRARIES, "PYTHONDONTWRITEBYTECODE": "1"}
    home = short_directory("tty")
    try:
        if ordinary:
            os.chown(home, NOBODY, NOBODY)
        crashed = subprocess.run([*python, CRASH, home, STUBBORN], env=env, capture_output=True)
        assert crashed.returncode == -signal.SIGKILL, crashed.stderr.decode()
        assert wait_until_empty(lambda: sleep_command_lines(home)) == []
        check = subprocess.run([*python, CHECK, home], env=env, capture_output=True, text=True)
        assert (check.stdout, check.returncode) == ("/dev/pts/0\n", 0), check.stderr
        assert wait_until_empty(lambda: [str(pid) for pid in sandbox_pids(f"{home}/home")]) == []
    finally:
        for pid in sandbox_pids(f"{home}/home"):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def sleep_command_lines(home: str) -> list[str]:
    """Return the command lines of the program's children, as seen on the host."""
    found = []
    for pid in sandbox_pids(f"{home}/home"):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "sleep" in line:
            found.append(line)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
@pytest.mark.timeout(300)
def test_terminals_as_an_ordinary_user() -> None:
    rerun_as_nobody(Path(__file__).parent, "not gvisor")
