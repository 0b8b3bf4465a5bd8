"""How terminals end: by themselves, by force, with the sandbox, and with the engine."""

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

from engine.terminals.screen import looking, output_of
from engine.traces import processes, settled
from ordinary import LIBRARIES, NOBODY, as_nobody, passes_for_nobody
from places import short_directory
from smokebox.engine.host import Host
from smokebox.errors import NotFound, ProcessEnded, SandboxGone

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

BOTH = pytest.mark.usefixtures("gvisor_too")
# Whatever it is told, it stays, and so do those that it has started.
STUBBORN = """
trap '' HUP TERM INT
setsid sleep 9991 &
nohup sleep 9992 >/dev/null 2>&1 &
(trap '' HUP; sleep 9993) &
echo ready
while true; do sleep 9994; done
"""


async def sleepers(sandbox: Sandbox) -> str:
    result = await sandbox.exec(["sh", "-c", "ps -eo args | grep '[s]leep 999'"])
    return result.stdout


@BOTH
async def test_kill_ends_all_that_was_started(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["bash", "-c", STUBBORN])
    async with looking(terminal) as screen:
        await screen.shows("ready")
        await terminal.kill()
        await screen.over()
    assert (terminal.running, terminal.exit_code) == (False, 137)
    assert await sleepers(sandbox) == ""


@BOTH
async def test_what_a_shell_leaves_behind_ends_with_it(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create("t", command=["bash", "--norc"])
    async with looking(terminal) as screen:
        await screen.type("setsid sleep 9991 & nohup sleep 9992 & disown -a; exit 5\n")
        assert await terminal.wait(10) == 5
        await screen.over()
    await sandbox.terminals.close("t")
    assert await sleepers(sandbox) == ""


async def test_a_hung_up_program_may_say_farewell(sandbox: Sandbox) -> None:
    script = "trap 'echo bye; exit 4' HUP; echo ready; while true; do sleep 0.1; done"
    # On a machine that is very busy two seconds may be too few, but not every time.
    for _ in range(3):
        terminal = await sandbox.terminals.create(command=["bash", "-c", script])
        async with looking(terminal) as screen:
            await screen.shows("ready")
            await terminal.kill()
            said = await screen.over()
        if terminal.exit_code == 4:
            break
    assert (terminal.exit_code, b"bye" in said) == (4, True)


async def test_terminals_end_alone(sandbox: Sandbox) -> None:
    first = await sandbox.terminals.create(command=["sleep", "9991"])
    second = await sandbox.terminals.create(command=["cat"])
    await first.kill()
    async with looking(second) as screen:
        await screen.type("here\n")
        await screen.shows("here\r\nhere\r\n")


async def test_a_program_that_kills_its_minder_has_ended(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(
        command=["sh", "-c", "read x; kill -9 $PPID; sleep 9991"]
    )
    await terminal.write("\n")
    assert await terminal.wait(10) == 137
    assert await sleepers(sandbox) == ""


async def test_who_else_writes_to_a_terminal_does_not_keep_it(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "echo ready; read x"])
    async with looking(terminal) as screen:
        await screen.shows("ready")
        await sandbox.start_process("exec yes >/dev/pts/0 2>/dev/null", process_id="other")
        await screen.shows("y\r\ny\r\n")
        await screen.type("\n")
        assert await terminal.wait(10) == 0
        await screen.over()
    await sandbox.processes.kill("other")


@BOTH
@pytest.mark.parametrize("end", ["sleep", "destroy"])
async def test_the_end_of_the_sandbox_is_told_to_viewers(sandbox: Sandbox, end: str) -> None:
    terminal = await sandbox.terminals.create("t", command=["bash", "-c", STUBBORN])

    async def look() -> bytes:
        seen = b""
        with pytest.raises(SandboxGone) as caught:
            async with terminal.view() as view:
                async for data in view:
                    seen += data
                    ready.set()
        assert caught.value.fields["sandbox_id"] == "box"
        return seen

    ready = asyncio.Event()
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        lookers = [group.create_task(look()) for _ in range(2)]
        waiter = group.create_task(wait_for_gone(terminal.wait(10)))
        await ready.wait()
        await getattr(sandbox, end)()
    assert [looker.result() for looker in lookers] == [b"ready\r\n"] * 2
    assert waiter.done()
    assert (terminal.running, terminal.exit_code) == (False, 137)
    with pytest.raises(SandboxGone):
        await terminal.write("x")
    if end == "sleep":
        assert await sandbox.terminals.get("t") is terminal
    else:
        with pytest.raises(NotFound):
            await sandbox.terminals.get("t")


async def wait_for_gone(waiting: asyncio.Future[int] | object) -> None:
    with pytest.raises(SandboxGone):
        await waiting  # type: ignore[misc]


async def test_programs_are_hung_up_before_the_sandbox_sleeps(sandbox: Sandbox) -> None:
    script = (
        "trap 'echo bye >/workspace/note; exit' HUP; echo ready; while true; do sleep 0.1; done"
    )
    terminal = await sandbox.terminals.create(command=["bash", "-c", script])
    async with looking(terminal) as screen:
        await screen.shows("ready")
    await sandbox.sleep()
    assert await sandbox.read_file("note") == "bye\n"


async def test_a_view_keeps_the_sandbox_awake_and_a_terminal_does_not(host: Host) -> None:
    sandbox = await host.create("brief", sleep_after=0.3)
    terminal = await sandbox.terminals.create(command=["sh", "-c", "sleep 1; echo done; cat"])
    async with looking(terminal) as screen:
        await screen.shows("done")
    assert terminal.running
    async with asyncio.timeout(10):
        while terminal.running:
            await asyncio.sleep(0.02)
    info = await sandbox.info()
    assert info is not None and info.status == "idle"
    with pytest.raises(SandboxGone):
        await output_of(terminal)


@pytest.mark.parametrize("detach", [True, False])
async def test_they_end_with_the_engine(tmp_path: Path, layers: Path, detach: bool) -> None:
    home = tmp_path / "home"
    host = await Host.open(home, pool=0, images=layers)
    terminal = await (await host.create("box")).terminals.create("t", command=["sh", "-c", "cat"])

    async def look() -> None:
        with pytest.raises(SandboxGone):
            await output_of(terminal)

    async with asyncio.TaskGroup() as group:
        group.create_task(look())
        await asyncio.sleep(0)
        await host.aclose(detach=detach)
    async with await Host.open(home, pool=0, images=layers) as host:
        sandbox = host.sandbox("box")
        with pytest.raises(NotFound):
            await sandbox.terminals.get("t")
        listed = await sandbox.exec(["ps", "-eo", "comm"])
        assert "cat" not in listed.stdout.split()


async def test_a_start_that_nobody_waits_for_leaves_nothing(sandbox: Sandbox) -> None:
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
        while await sleepers(sandbox):
            await asyncio.sleep(0.05)


async def test_who_types_into_what_does_not_read_is_let_go(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["sh", "-c", "stty raw; sleep 9991"])
    typing = asyncio.create_task(terminal.write(b"x" * 1_000_000))
    await asyncio.wait([typing], timeout=0.3)
    assert not typing.done()
    await terminal.kill()
    with pytest.raises(ProcessEnded):
        await typing


CRASH = """
import asyncio, os, signal, sys
from smokebox.engine.host import Host

async def main(home):
    host = await Host.open(home + "/home", pool=0, images=home + "/layers")
    sandbox = await host.create("box")
    terminal = await sandbox.terminals.create("t", command=["bash", "-c", sys.argv[2]])
    async with terminal.view() as view:
        seen = b""
        while b"ready" not in seen:
            seen += await anext(view)
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
@pytest.mark.parametrize("ordinary", [False, True], ids=["ourselves", "nobody"])
def test_nothing_of_them_outlives_an_engine_that_is_killed(ordinary: bool) -> None:
    if ordinary and os.geteuid() != 0:
        pytest.skip("only root can be another")
    python = [*as_nobody(), "/usr/bin/python3", "-c"] if ordinary else [sys.executable, "-c"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": LIBRARIES, "PYTHONDONTWRITEBYTECODE": "1"}
    home = short_directory("tty")
    try:
        if ordinary:
            os.chown(home, NOBODY, NOBODY)
        crashed = subprocess.run([*python, CRASH, home, STUBBORN], env=env, capture_output=True)
        assert crashed.returncode == -signal.SIGKILL, crashed.stderr.decode()
        assert settled(lambda: sleeping(home)) == []
        check = subprocess.run([*python, CHECK, home], env=env, capture_output=True, text=True)
        assert (check.stdout, check.returncode) == ("/dev/pts/0\n", 0), check.stderr
        assert settled(lambda: [str(pid) for pid in processes(f"{home}/home")]) == []
    finally:
        for pid in processes(f"{home}/home"):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def sleeping(home: str) -> list[str]:
    """What the stubborn program has started, as the host sees it."""
    found = []
    for pid in processes(f"{home}/home"):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if "sleep" in line:
            found.append(line)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user")
@pytest.mark.timeout(300)
def test_all_of_this_holds_for_an_ordinary_user() -> None:
    passes_for_nobody(Path(__file__).parent, "not gvisor")
