"""Sessions of a sandbox: their names, their turns, their lives."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from engine.session_box import Box, eventually, open_box, processes
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
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with open_box(tmp_path) as box:
        yield box


@pytest.fixture
async def session(box: Box) -> ShellSession:
    return await box.sessions.create("s")


def folders(box: Box) -> list[str]:
    return os.listdir(f"{box.directory}/run/io")


async def test_names(box: Box, session: ShellSession) -> None:
    unnamed = [await box.sessions.create() for _ in range(20)]
    assert len({one.name for one in unnamed}) == 20
    assert (session.name, session.id) == ("s", "s")
    assert await box.sessions.get("s") is session
    assert await box.sessions.list() == [session, *unnamed]


async def test_a_name_is_taken_once(box: Box) -> None:
    tries = [box.sessions.create("same") for _ in range(5)]
    made = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(one, ShellSession) for one in made) == 1
    assert sum(isinstance(one, Conflict) for one in made) == 4


async def test_what_is_not_there(box: Box, session: ShellSession) -> None:
    for call in (box.sessions.get("other"), box.sessions.delete("other")):
        with pytest.raises(NotFound, match="other"):
            await call
    await box.sessions.delete("s")
    with pytest.raises(NotFound):
        await box.sessions.get("s")
    with pytest.raises(NotFound):
        await session.exec("true")
    assert await box.sessions.list() == []


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
async def test_what_cannot_be(box: Box, options: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        await box.sessions.create(**options)  # type: ignore[arg-type]
    assert await box.record.rows(SessionRow, "box") == []


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"timeout": "1"}, {"env": {"1": "x"}}, {"stdin": 5}, {"env": {"A": "\0"}}],
)
async def test_bad_options_of_a_command(session: ShellSession, options: dict[str, float]) -> None:
    with pytest.raises(InvalidOption):
        await session.exec("true", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption):
        session.exec_stream("true", **options)  # type: ignore[arg-type]


async def test_a_session_begins_as_it_was_made(box: Box) -> None:
    session = await box.sessions.create(cwd="../tmp", env={"A": "$(id) '\"\n"})
    result = await session.exec('pwd; printenv A; echo "$HOME $USER"')
    assert result.stdout == "/tmp\n$(id) '\"\n\n/root root\n"
    assert session.cwd.endswith("/tmp")


async def test_an_unknown_user_is_refused_with_the_first_command(box: Box) -> None:
    session = await box.sessions.create(user="nobody-here")
    with pytest.raises((NotFound, Unsupported)):
        await session.exec("id")


async def test_commands_run_in_their_order_one_at_a_time(session: ShellSession) -> None:
    async def run(number: int) -> str:
        command = f"[ -e busy ] && echo overlap; touch busy; sleep 0.01; rm busy; n+={number},"
        return (await session.exec(f"{command}; echo $n")).stdout

    outputs = await asyncio.gather(*(run(number) for number in range(10)))
    assert outputs[-1] == "0,1,2,3,4,5,6,7,8,9,\n"
    assert not any("overlap" in output for output in outputs)


async def test_sessions_run_in_parallel_and_apart(box: Box) -> None:
    sessions = [await box.sessions.create(f"p{n}") for n in range(5)]
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


async def test_a_command_that_waits_can_be_cancelled(box: Box, session: ShellSession) -> None:
    running = asyncio.create_task(session.exec("while [ ! -e go ]; do sleep 0.01; done; echo 1"))
    waiting = [asyncio.create_task(session.exec(f"echo {n} >> ran")) for n in range(3)]
    await eventually(lambda: session.busy)
    await asyncio.sleep(0)
    waiting[1].cancel()
    await box.exec("touch go")
    assert (await running).stdout == "1\n"
    await asyncio.wait(waiting)
    assert (await session.exec("cat ran")).stdout == "0\n2\n"


async def test_a_command_counts_as_use_and_a_waiting_sandbox_does_not(
    box: Box, session: ShellSession
) -> None:
    stream = session.exec_stream("echo on; sleep 1000")
    await anext(stream)
    assert (box.uses, box.sessions.busy) == (1, True)
    await stream.aclose()
    assert (box.uses, box.sessions.busy) == (0, False)


async def test_deleting_kills_the_shell_its_jobs_and_its_command(box: Box) -> None:
    session = await box.sessions.create("doomed")
    await session.exec("sleep 1011 >/dev/null 2>&1 & setsid sleep 1012 >/dev/null 2>&1 &")
    # What was left by a former shell is of the session, too.
    assert (await session.exec("exit 3")).session_ended
    running = asyncio.create_task(session.exec("sleep 1013"))
    waiting = asyncio.create_task(session.exec("echo no"))
    await eventually(lambda: "sleep 1013" in processes(box))
    assert {"sleep 1011", "sleep 1012"} < set(processes(box))
    await box.sessions.delete("doomed")
    assert processes(box) == []
    assert folders(box) == []
    for task in (running, waiting):
        with pytest.raises(NotFound, match="doomed"):
            await task
    again = await box.sessions.create("doomed")
    assert (await again.exec("echo $?")).stdout == "0\n"


async def test_deleting_before_the_shell_is_there(box: Box, session: ShellSession) -> None:
    running = asyncio.create_task(session.exec("sleep 1017"))
    while not folders(box):
        await asyncio.sleep(0)
    await box.sessions.delete("s")
    with pytest.raises(NotFound):
        await running
    assert processes(box) == []


async def test_the_end_of_the_sandbox_under_a_command(box: Box, session: ShellSession) -> None:
    await session.exec("cd /tmp; X=1")
    await session.saved()
    running = asyncio.create_task(session.exec("sleep 1014"))
    waiting = asyncio.create_task(session.exec("echo no >> /tmp/no"))
    await eventually(lambda: "sleep 1014" in processes(box))
    await box.jail.kill()
    await box.sessions.ended("out of memory")
    for task in (running, waiting):
        with pytest.raises(SandboxGone):
            await task
    await box.wake()
    assert (await session.exec("echo $PWD $X; ls /tmp")).stdout == "/tmp 1\n"


async def test_the_end_of_the_engine_ends_the_shells(box: Box, session: ShellSession) -> None:
    await session.exec("cd /tmp; sleep 1015 >/dev/null 2>&1 &")
    running = asyncio.create_task(session.exec("sleep 1016"))
    await eventually(lambda: "sleep 1016" in processes(box))
    await box.sessions.ended("the engine was stopped")
    with pytest.raises(SandboxGone, match="stopped"):
        await running
    await eventually(lambda: processes(box) == [])
    assert folders(box) == []
    assert (await session.exec("pwd")).stdout == "/tmp\n"


async def test_what_a_killed_engine_left_is_swept(box: Box, session: ShellSession) -> None:
    stale = f"{box.directory}/run/io/s-0123456789abcdef"
    os.mkdir(stale)
    os.mkfifo(f"{stale}/bash")
    await session.exec("true")
    assert not os.path.exists(stale)
    await (await box.sessions.create()).exec("true")
    assert len(folders(box)) == 2


async def test_the_state_goes_on_in_the_record_after_each_command(
    box: Box, session: ShellSession
) -> None:
    async def kept() -> bytes | None:
        await session.saved()
        row = await box.record.get(SessionRow, "box", "s")
        assert row is not None
        return row.state

    assert await kept() is None
    await session.exec("cd /tmp; MINE=1")
    first = await kept()
    assert first is not None
    assert first.startswith(b"/tmp\0")
    assert b'declare -- MINE="1"\n' in first
    await session.exec("true")
    assert await kept() == first
    assert b"smokebox" not in first
    await session.exec("exit")
    assert await kept() is None


async def test_set_env(box: Box, session: ShellSession) -> None:
    tricky = "$(id) `id` '\"\n\\ x;"
    await session.set_env({"A": tricky, "B": "b"})
    assert (await session.exec("printenv A; printenv B")).stdout == f"{tricky}\nb\n"
    await session.set_env({"B": None, "LANG": None, "C": ""})
    assert (await session.exec("echo ${B-no} ${LANG-no} [${C-no}]")).stdout == "no no []\n"
    # It is the session's own, also for a fresh shell.
    await session.exec("exit")
    assert (await session.exec("printenv A; echo ${B-no}")).stdout == f"{tricky}\nno\n"
    await box.sleep()
    assert (await session.exec("printenv A")).stdout == f"{tricky}\n"


@pytest.mark.parametrize("env", [{"A; id": "x"}, {"A": 5}, {"": None}, {"A": "\0"}, "A=b"])
async def test_set_env_refuses(session: ShellSession, env: dict[str, str | None]) -> None:
    with pytest.raises(InvalidOption):
        await session.set_env(env)


async def test_set_env_of_a_readonly_variable(session: ShellSession) -> None:
    await session.exec("readonly FIXED=1")
    with pytest.raises(InvalidOption, match="FIXED"):
        await session.set_env({"FIXED": "2"})
    assert (await session.exec("echo $FIXED")).stdout == "1\n"


async def test_nothing_is_left_open(box: Box, session: ShellSession) -> None:
    await session.exec("true")
    await session.saved()
    before = len(os.listdir("/proc/self/fd"))
    for command in ("true", "exit 3", "sleep 0.3 &", "nosuch", "sleep 9", "kill -9 $$", "set -n"):
        await session.exec(command, timeout=0.5, stdin="x")
    with pytest.raises(FileNotFoundError):
        await session.exec("pwd", cwd="/nope")
    await session.exec("true")
    await session.saved()
    await asyncio.sleep(0.4)
    await session.exec("exit")
    await session.exec("true")
    await session.saved()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert len(folders(box)) == 1
