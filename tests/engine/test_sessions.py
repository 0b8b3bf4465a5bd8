"""Sessions of a sandbox: names, order of commands, deletion and recorded state."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from engine.awake_sandbox import AwakeSandbox, command_lines, eventually, open_sandbox
from smokebox.engine.record.rows import SessionRow
from smokebox.engine.sessions.session import ShellSession
from smokebox.errors import (
    Conflict,
    InvalidOption,
    InvalidPath,
    NotFound,
    SandboxGone,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[AwakeSandbox]:
    async with open_sandbox(tmp_path) as sandbox:
        yield sandbox


@pytest.fixture
async def session(sandbox: AwakeSandbox) -> ShellSession:
    return await sandbox.sessions.create("s")


def directories(sandbox: AwakeSandbox) -> list[str]:
    return [name for name in os.listdir(f"{sandbox.path}/run/io") if name != "output"]


async def test_sessions_are_found_by_name(sandbox: AwakeSandbox, session: ShellSession) -> None:
    unnamed = [await sandbox.sessions.create() for _ in range(20)]
    assert len({one.name for one in unnamed}) == 20
    assert (session.name, session.id) == ("s", "s")
    assert await sandbox.sessions.get("s") is session
    assert await sandbox.sessions.list() == [session, *unnamed]


async def test_one_of_concurrent_creates_with_the_same_name_wins(sandbox: AwakeSandbox) -> None:
    tries = [sandbox.sessions.create("same") for _ in range(5)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(one, ShellSession) for one in results) == 1
    assert sum(isinstance(one, Conflict) for one in results) == 4


async def test_unknown_and_deleted_sessions_are_not_found(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    for call in (sandbox.sessions.get("other"), sandbox.sessions.delete("other")):
        with pytest.raises(NotFound, match="other"):
            await call
    await sandbox.sessions.delete("s")
    with pytest.raises(NotFound):
        await sandbox.sessions.get("s")
    with pytest.raises(NotFound):
        await session.exec("true")
    assert await sandbox.sessions.list() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, InvalidOption),
        ({"name": "../x"}, InvalidOption),
        ({"name": 5}, InvalidOption),
        ({"cwd": ""}, InvalidPath),
        ({"cwd": "a\0b"}, InvalidPath),
        ({"env": {"A B": "x"}}, InvalidOption),
        ({"env": {"A": 5}}, InvalidOption),
        ({"user": "no one"}, InvalidOption),
    ],
)
async def test_invalid_session_options_are_refused(
    sandbox: AwakeSandbox, options: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await sandbox.sessions.create(**options)  # type: ignore[arg-type]
    assert await sandbox.record.rows(SessionRow, "box") == []


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"timeout": "1"}, {"env": {"1": "x"}}, {"stdin": 5}, {"env": {"A": "\0"}}],
)
async def test_invalid_command_options_are_refused(
    session: ShellSession, options: dict[str, float]
) -> None:
    with pytest.raises(InvalidOption):
        await session.exec("true", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption):
        session.exec_stream("true", **options)  # type: ignore[arg-type]


async def test_session_starts_with_its_cwd_and_env(sandbox: AwakeSandbox) -> None:
    session = await sandbox.sessions.create(cwd="../tmp", env={"A": "$(id) '\"\n"})
    result = await session.exec('pwd; printenv A; echo "$HOME $USER"')
    assert result.stdout == "/tmp\n$(id) '\"\n\n/root root\n"
    assert session.cwd.endswith("/tmp")


async def test_first_command_refuses_an_unknown_user(sandbox: AwakeSandbox) -> None:
    session = await sandbox.sessions.create(user="unknown-user")
    with pytest.raises((NotFound, Unsupported)):
        await session.exec("id")


async def test_commands_run_in_order_one_at_a_time(session: ShellSession) -> None:
    async def run(number: int) -> str:
        command = f"[ -e busy ] && echo overlap; touch busy; sleep 0.01; rm busy; n+={number},"
        return (await session.exec(f"{command}; echo $n")).stdout

    outputs = await asyncio.gather(*(run(number) for number in range(10)))
    assert outputs[-1] == "0,1,2,3,4,5,6,7,8,9,\n"
    assert not any("overlap" in output for output in outputs)


async def test_sessions_run_in_parallel_with_separate_state(sandbox: AwakeSandbox) -> None:
    sessions = [await sandbox.sessions.create(f"p{n}") for n in range(5)]
    for number, session in enumerate(sessions):
        await session.exec(f"X={number}; mkdir /tmp/{number}; cd /tmp/{number}")
    # Each waits for the one before it, which only works at the same time.
    await asyncio.gather(
        *(
            session.exec(
                f"touch /tmp/here{n}; until [ -e /tmp/here{(n + 1) % 5} ]; do sleep 0.01; done"
            )
            for n, session in enumerate(sessions)
        )
    )
    results = [await session.exec("echo $X $PWD") for session in sessions]
    assert [result.stdout for result in results] == [f"{n} /tmp/{n}\n" for n in range(5)]


async def test_waiting_command_can_be_cancelled(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    running = asyncio.create_task(session.exec("while [ ! -e go ]; do sleep 0.01; done; echo 1"))
    waiting = [asyncio.create_task(session.exec(f"echo {n} >> ran")) for n in range(3)]
    await eventually(lambda: session.busy)
    await asyncio.sleep(0)
    waiting[1].cancel()
    await sandbox.run_command("touch go")
    assert (await running).stdout == "1\n"
    await asyncio.wait(waiting)
    assert (await session.exec("cat ran")).stdout == "0\n2\n"


async def test_running_command_keeps_the_sandbox_awake(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    stream = session.exec_stream("echo on; sleep 1000")
    await anext(stream)
    assert (sandbox.uses, sandbox.sessions.busy) == (1, True)
    await stream.aclose()
    assert (sandbox.uses, sandbox.sessions.busy) == (0, False)


async def test_delete_kills_the_shell_its_jobs_and_its_command(sandbox: AwakeSandbox) -> None:
    session = await sandbox.sessions.create("doomed")
    await session.exec("sleep 1011 >/dev/null 2>&1 & setsid sleep 1012 >/dev/null 2>&1 &")
    # Background processes of an earlier shell belong to the session too.
    assert (await session.exec("exit 3")).session_ended
    running = asyncio.create_task(session.exec("sleep 1013"))
    waiting = asyncio.create_task(session.exec("echo no"))
    await eventually(lambda: "sleep 1013" in command_lines(sandbox))
    assert {"sleep 1011", "sleep 1012"} < set(command_lines(sandbox))
    await sandbox.sessions.delete("doomed")
    assert command_lines(sandbox) == []
    assert directories(sandbox) == []
    for task in (running, waiting):
        with pytest.raises(NotFound, match="doomed"):
            await task
    again = await sandbox.sessions.create("doomed")
    assert (await again.exec("echo $?")).stdout == "0\n"


async def test_delete_while_the_shell_starts(sandbox: AwakeSandbox, session: ShellSession) -> None:
    running = asyncio.create_task(session.exec("sleep 1017"))
    while not directories(sandbox):
        await asyncio.sleep(0)
    await sandbox.sessions.delete("s")
    with pytest.raises(NotFound):
        await running
    assert command_lines(sandbox) == []


async def test_end_of_the_run_interrupts_commands_and_keeps_the_state(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    await session.exec("cd /tmp; X=1")
    await session.flush()
    running = asyncio.create_task(session.exec("sleep 1014"))
    waiting = asyncio.create_task(session.exec("echo no >> /tmp/no"))
    await eventually(lambda: "sleep 1014" in command_lines(sandbox))
    await sandbox.jail.kill()
    await sandbox.sessions.ended("out of memory")
    for task in (running, waiting):
        with pytest.raises(SandboxGone):
            await task
    await sandbox.wake()
    assert (await session.exec("echo $PWD $X; ls /tmp")).stdout == "/tmp 1\n"


async def test_end_of_the_engine_kills_the_shells(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    await session.exec("cd /tmp; sleep 1015 >/dev/null 2>&1 &")
    running = asyncio.create_task(session.exec("sleep 1016"))
    await eventually(lambda: "sleep 1016" in command_lines(sandbox))
    await sandbox.sessions.ended("the engine was stopped")
    with pytest.raises(SandboxGone, match="stopped"):
        await running
    await eventually(lambda: command_lines(sandbox) == [])
    assert directories(sandbox) == []
    assert (await session.exec("pwd")).stdout == "/tmp\n"


async def test_directories_of_a_killed_engine_are_removed(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    stale = f"{sandbox.path}/run/io/s-0123456789abcdef"
    os.mkdir(stale)
    os.mkfifo(f"{stale}/bash")
    await session.exec("true")
    assert not os.path.exists(stale)
    await (await sandbox.sessions.create()).exec("true")
    assert len(directories(sandbox)) == 2


async def test_state_is_recorded_after_each_command(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    async def recorded_state() -> bytes | None:
        await session.flush()
        row = await sandbox.record.get(SessionRow, "box", "s")
        assert row is not None
        return row.state

    assert await recorded_state() is None
    await session.exec("cd /tmp; MINE=1")
    first = await recorded_state()
    assert first is not None
    assert first.startswith(b"/tmp\0")
    assert b'declare -- MINE="1"\n' in first
    await session.exec("true")
    assert await recorded_state() == first
    assert b"smokebox" not in first
    await session.exec("exit")
    assert await recorded_state() is None


async def test_set_env_exports_and_unsets_variables(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    tricky = "$(id) `id` '\"\n\\ x;"
    await session.set_env({"A": tricky, "B": "b"})
    assert (await session.exec("printenv A; printenv B")).stdout == f"{tricky}\nb\n"
    await session.set_env({"B": None, "LANG": None, "C": ""})
    assert (await session.exec("echo ${B-no} ${LANG-no} [${C-no}]")).stdout == "no no []\n"
    # It also applies to the next shell.
    await session.exec("exit")
    assert (await session.exec("printenv A; echo ${B-no}")).stdout == f"{tricky}\nno\n"
    await sandbox.restart()
    assert (await session.exec("printenv A")).stdout == f"{tricky}\n"


@pytest.mark.parametrize("env", [{"A; id": "x"}, {"A": 5}, {"": None}, {"A": "\0"}, "A=b"])
async def test_set_env_refuses_invalid_variables(
    session: ShellSession, env: dict[str, str | None]
) -> None:
    with pytest.raises(InvalidOption):
        await session.set_env(env)


async def test_set_env_refuses_a_readonly_variable(session: ShellSession) -> None:
    await session.exec("readonly FIXED=1")
    with pytest.raises(InvalidOption, match="FIXED"):
        await session.set_env({"FIXED": "2"})
    assert (await session.exec("echo $FIXED")).stdout == "1\n"


async def test_commands_leave_no_descriptor_open(
    sandbox: AwakeSandbox, session: ShellSession
) -> None:
    await session.exec("true")
    await session.flush()
    before = len(os.listdir("/proc/self/fd"))
    for command in ("true", "exit 3", "sleep 0.3 &", "nosuch", "sleep 9", "kill -9 $$", "set -n"):
        await session.exec(command, timeout=0.5, stdin="x")
    with pytest.raises(FileNotFoundError):
        await session.exec("pwd", cwd="/nope")
    await session.exec("true")
    await session.flush()
    await asyncio.sleep(0.4)
    await session.exec("exit")
    await session.exec("true")
    await session.flush()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(directories(sandbox)) == 1
