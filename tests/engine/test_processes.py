"""Lasting processes: started, held, killed, found again after a crash, and forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from engine.lasting_box import Box, commands, eventually, files, open_box, rows
from smokebox.engine.jail import guest_init
from smokebox.engine.processes import processes as processes_module
from smokebox.engine.processes.lifetime import ExitRecord, ProcessExit, parse_exit_file
from smokebox.errors import (
    AccessDenied,
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    NotFound,
    PathNotFound,
    SandboxGone,
    SmokeboxError,
)
from smokebox.limits import ProcessLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def exit_of(code: int, killed: bool = False) -> ProcessExit:
    return ProcessExit(code=code, killed=killed)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with open_box(tmp_path) as box:
        yield box


async def test_a_started_process_runs_and_is_in_the_record(box: Box) -> None:
    process = await box.processes.start("sleep 100", process_id="web")
    assert (process.id, process.status, process.command) == ("web", "running", "sleep 100")
    assert process.exit_code is None
    [row] = await rows(box)
    assert (row.process_id, row.status, row.pid) == ("web", "running", process.pid)
    assert await box.processes.get("web") is process


@pytest.mark.parametrize(
    ("command", "status", "code"),
    [
        ("true", "exited", 0),
        ("exit 3", "exited", 3),
        ("kill -9 $$", "killed", 137),
        ("kill -34 $$", "killed", 162),
        ("nosuchprogram", "exited", 127),
        (["/bin/bash", "-c", "exit 255"], "exited", 255),
    ],
)
async def test_the_end_is_noticed_and_written_down(
    box: Box, command: str | list[str], status: str, code: int
) -> None:
    process = await box.processes.start(command)
    assert await process.wait_for_exit(10) == code
    assert (process.status, process.exit_code) == (status, code)
    assert process.ended_at is not None and process.ended_at >= process.started_at
    await box.processes.aclose()
    [row] = await rows(box)
    assert row == process.row


@pytest.mark.parametrize(
    ("command", "options", "error"),
    [
        (["nosuchprogram"], {}, PathNotFound),
        (["/workspace"], {}, AccessDenied),
        ("true", {"cwd": "/no/such"}, PathNotFound),
        ("true", {"cwd": "/etc\0"}, SmokeboxError),
        ("echo \0", {}, InvalidOption),
        ("", {"process_id": "a/b"}, InvalidOption),
        (["echo", "x" * (3 << 20)], {}, InvalidOption),
    ],
)
async def test_a_start_that_fails_leaves_nothing(
    box: Box, command: str | list[str], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await box.processes.start(command, **options)
    assert (await rows(box), files(box), await box.processes.list()) == ([], set(), [])


async def test_bad_options_are_refused_by_name(box: Box) -> None:
    cases: list[dict[str, Any]] = [
        {"command": []},
        {"command": b"true"},
        {"command": ["true", 1]},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": "5"},
        {"process_id": ""},
        {"process_id": "../x"},
        {"process_id": 7},
        {"stdin": "text"},
        {"env": {"A=B": "c"}},
        {"user": 1000},
    ]
    for options in cases:
        [name] = options
        with pytest.raises(InvalidOption) as caught:
            await box.processes.start(**{"command": "true", **options})
        assert caught.value.hint and caught.value.fields["option"] == name
    assert await rows(box) == []


async def test_an_id_that_is_taken_is_refused_until_cleanup(box: Box) -> None:
    first = await box.processes.start("true", process_id="job")
    with pytest.raises(Conflict, match="job"):
        await box.processes.start("true", process_id="job")
    await first.kill()
    await first.wait_for_exit(5)
    await eventually(lambda: first.gone)
    assert await box.processes.cleanup() == 1
    assert (await box.processes.start("true", process_id="job")).id == "job"


async def test_one_of_two_starts_with_one_id_wins(box: Box) -> None:
    both = await asyncio.gather(
        *(box.processes.start("sleep 9", process_id="one") for _ in range(2)),
        return_exceptions=True,
    )
    assert sorted(type(one).__name__ for one in both) == ["BackgroundProcess", "Conflict"]
    assert len(await rows(box)) == 1


async def test_options_reach_the_process(box: Box) -> None:
    process = await box.processes.start(
        'echo "$PWD $A"; ulimit -n',
        cwd="/tmp",
        env={"A": "b c"},
        limits=ProcessLimits(open_files=77),
    )
    await process.wait_for_exit(5)
    assert (await process.logs()).stdout == "/tmp b c\n77\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users to give")
async def test_another_user_can_open_its_stdin_and_stdout_by_name(box: Box) -> None:
    process = await box.processes.start(
        "id -u; read line </dev/stdin; echo $line >/dev/stdout; echo err >/dev/stderr",
        user="alice",
        stdin=True,
    )
    await process.write_stdin("hello\n")
    assert await process.wait_for_exit(5) == 0
    logs = await process.logs()
    assert (logs.stdout, logs.stderr) == ("1000\nhello\n", "err\n")


async def test_opening_dev_stdout_does_not_empty_the_log(box: Box) -> None:
    process = await box.processes.start("echo a; echo b >/dev/stdout; echo c; : >/dev/stdout")
    await process.wait_for_exit(5)
    assert (await process.logs()).stdout == "a\nb\nc\n"


async def test_kill_ends_daemons_too_and_returns_when_all_are_gone(box: Box) -> None:
    process = await box.processes.start(
        "setsid sleep 1001 & (setsid sh -c 'setsid sleep 1002 & sleep 1003' &) ; sleep 1004"
    )
    await eventually(lambda: len(commands(box)) >= 4)
    await process.kill()
    assert commands(box) == []
    assert (process.status, process.exit_code, process.gone) == ("killed", 143, True)


async def test_kill_takes_what_ignores_sigterm_after_the_grace(box: Box) -> None:
    process = await box.processes.start("trap '' TERM; echo ready; while :; do sleep 1; done")
    await process.wait_for_log("ready", 5)
    await process.kill(grace=0.2)
    assert (process.status, process.exit_code, commands(box)) == ("killed", 137, [])


async def test_a_process_that_ends_well_on_sigterm_has_exited(box: Box) -> None:
    process = await box.processes.start("trap 'echo bye; exit 0' TERM; echo up; sleep 99 & wait")
    await process.wait_for_log("up", 5)
    await process.kill()
    assert (process.status, process.exit_code) == ("exited", 0)
    assert (await process.logs()).stdout == "up\nbye\n"


@pytest.mark.parametrize("name", ["SIGUSR1", "usr1", 10, signal.SIGUSR1])
async def test_an_explicit_signal_is_sent_and_nothing_else(box: Box, name: str | int) -> None:
    process = await box.processes.start(
        "trap 'echo got' USR1; echo up; while :; do sleep 0.05; done"
    )
    await process.wait_for_log("up", 5)
    await process.kill(name)
    await process.wait_for_log("got", 5)
    assert process.status == "running"


async def test_kill_of_an_ended_process_does_nothing(box: Box) -> None:
    process = await box.processes.start("exit 4")
    await process.wait_for_exit(5)
    await process.kill()
    await process.kill("SIGKILL")
    assert (process.status, process.exit_code) == ("exited", 4)


async def test_kill_after_the_exit_ends_what_was_left_behind(box: Box) -> None:
    process = await box.processes.start("sleep 1001 & exit 0")
    assert await process.wait_for_exit(5) == 0
    await eventually(lambda: commands(box) == ["sleep 1001"])
    assert not process.gone
    await process.kill()
    assert commands(box) == [] and process.gone
    assert process.status == "exited"


async def test_bad_signals_are_refused(box: Box) -> None:
    process = await box.processes.start("sleep 9")
    bad: list[Any] = ["SIGNOPE", "", 0, 65, -9, True, 1.5, "SIG_DFL"]
    for name in bad:
        with pytest.raises(InvalidOption, match="signal"):
            await process.kill(name)
    with pytest.raises(InvalidOption, match="grace"):
        await process.kill(grace=-1)
    assert process.status == "running"


async def test_an_unknown_process_is_not_found(box: Box) -> None:
    with pytest.raises(NotFound, match="nosuch"):
        await box.processes.get("nosuch")
    with pytest.raises(NotFound, match="nosuch"):
        await box.processes.kill("nosuch")


async def test_twenty_at_once_are_all_counted_and_killed(box: Box) -> None:
    started = await asyncio.gather(*(box.processes.start(f"sleep 10{i:02}") for i in range(20)))
    assert len({process.pid for process in started}) == 20
    assert len(await box.processes.list()) == 20
    assert await box.processes.kill_all() == 20
    assert commands(box) == []
    assert {process.status for process in started} == {"killed"}
    assert await box.processes.kill_all() == 0


async def test_what_has_ended_by_itself_is_not_counted(box: Box) -> None:
    """Also while who minds it is still there, for a moment."""
    for _ in range(20):
        process = await box.processes.start("true")
        await process.wait_for_exit(10)
        assert await box.processes.kill_all() == 0
        assert process.gone


async def test_what_an_ended_process_left_behind_is_counted(box: Box) -> None:
    process = await box.processes.start("sleep 1001 & true")
    await process.wait_for_exit(10)
    assert await box.processes.kill_all() == 1
    assert commands(box) == []


async def test_a_lifetime_ends_the_tree_with_124(box: Box) -> None:
    process = await box.processes.start("setsid sleep 1001 & sleep 1002", timeout=0.2)
    assert await process.wait_for_exit(10) == 124
    assert process.status == "killed"
    await eventually(lambda: commands(box) == [])


async def test_waiting_has_an_end(box: Box) -> None:
    process = await box.processes.start("sleep 99", process_id="slow")
    with pytest.raises(DeadlineExceeded, match=r"slow.*to end"):
        await process.wait_for_exit(0.05)
    assert process.status == "running"


async def test_a_process_that_kills_its_supervisor_is_lost_and_gone(box: Box) -> None:
    process = await box.processes.start(
        "read go; sleep 1001 & kill -9 $PPID; sleep 1002", stdin=True
    )
    await process.write_stdin("go\n")
    assert await process.wait_for_exit(10) == 137
    assert process.status == "lost"
    await eventually(lambda: commands(box) == [])


async def test_a_stopped_supervisor_keeps_nobody_from_killing(box: Box) -> None:
    process = await box.processes.start("read go; kill -STOP $PPID; exec sleep 1001", stdin=True)
    await process.write_stdin("go\n")
    await eventually(lambda: commands(box) == ["sleep 1001"])
    await process.kill(grace=0.1)
    assert commands(box) == []
    assert process.exit_code == 143


async def test_a_process_that_stops_its_supervisor_before_it_answers_is_not_left(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.jail.guest_requests.ANSWER_SECONDS", 1.0)
    with contextlib.suppress(SandboxGone):
        process = await box.processes.start("kill -STOP $PPID; sleep 1001")
        await process.kill(grace=0)
    await box.processes.cleanup()
    await eventually(lambda: commands(box) == [])
    assert (await rows(box), files(box)) == ([], set())


async def test_nothing_inside_can_reach_the_logs_or_the_end_of_a_process(box: Box) -> None:
    process = await box.processes.start(
        "ls -l /proc/$PPID/fd; ls -l /proc/self/fd | grep -c -E 'run|[.](out|err|exit)'"
    )
    assert await process.wait_for_exit(5) == 1
    logs = await process.logs()
    assert logs.stdout == "0\n" and "denied" in logs.stderr


async def test_ended_processes_are_kept_up_to_a_number(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "MOST_ENDED", 3)
    for number in range(6):
        process = await box.processes.start("true", process_id=f"job{number}")
        await eventually(lambda process=process: process.gone)  # type: ignore[misc]
    await box.processes.aclose()
    assert [one.id for one in await box.processes.list()] == ["job3", "job4", "job5"]
    assert len(await rows(box)) == 3
    assert {name.partition(".")[0] for name in files(box)} == {"job3", "job4", "job5"}


async def test_ended_processes_are_kept_up_to_a_size(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "MOST_LOGS", 100 << 10)
    for number in range(3):
        process = await box.processes.start(
            ["head", "-c64000", "/dev/zero"], process_id=f"j{number}"
        )
        await eventually(lambda process=process: process.gone)  # type: ignore[misc]
    await box.processes.aclose()
    assert [one.id for one in await box.processes.list()] == ["j2"]


async def test_cleanup_leaves_what_runs_or_left_something_running(box: Box) -> None:
    running = await box.processes.start("sleep 99")
    left = await box.processes.start("sleep 98 & true")
    ended = await box.processes.start("true")
    for process in (left, ended):
        await process.wait_for_exit(5)
    await eventually(lambda: ended.gone)
    assert await box.processes.cleanup() == 1
    assert {one.id for one in await box.processes.list()} == {running.id, left.id}


async def test_a_start_that_nobody_waits_for_is_undone(box: Box) -> None:
    for delay in (0.0, 0.002, 0.004, 0.008):
        starting = asyncio.create_task(box.processes.start("sleep 1001"))
        await asyncio.sleep(delay)
        starting.cancel()
        done = await asyncio.wait([starting])
        if not next(iter(done[0])).cancelled():
            await starting.result().kill()
    await box.processes.aclose()
    await box.processes.cleanup()
    assert (commands(box), await rows(box), files(box)) == ([], [], set())


async def test_waiting_and_following_count_as_activity(box: Box) -> None:
    process = await box.processes.start("sleep 99")
    assert box.uses == 0
    waiting = asyncio.create_task(process.wait_for_exit())
    following = asyncio.create_task(anext(process.stream_logs(), None))
    await asyncio.sleep(0.05)
    assert box.uses == 2
    await process.kill()
    await asyncio.wait([waiting, following])
    assert box.uses == 0


BEGUN = guest_init.BEGUN.pack(b"S", 7, 6)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", ExitRecord()),
        (b"S", ExitRecord()),
        (BEGUN, ExitRecord(leader=7, supervisor_pid=6)),
        (guest_init.BEGUN.pack(b"S", 0, 6), ExitRecord(supervisor_pid=6)),
        (
            guest_init.BEGUN.pack(b"S", -1, 6) + guest_init.EXIT.pack(b"X", 0),
            ExitRecord(supervisor_pid=6),
        ),
        (guest_init.BEGUN.pack(b"S", 7, 1), ExitRecord()),
        (b"\xff" * 99, ExitRecord()),
        (
            BEGUN + guest_init.EXIT.pack(b"X", 0x300),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(3)),
        ),
        (
            BEGUN + guest_init.EXIT.pack(b"X", 9),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(137, True)),
        ),
        (
            BEGUN + guest_init.EXIT.pack(b"T", 0),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(124, True)),
        ),
        (
            BEGUN + guest_init.EXIT.pack(b"X", -5),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(255)),
        ),
        (
            BEGUN + guest_init.EXIT.pack(b"?", 0),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(255)),
        ),
        (BEGUN + b"X\0", ExitRecord(leader=7, supervisor_pid=6)),
    ],
)
def test_what_a_supervisor_tells_is_checked(data: bytes, told: ExitRecord) -> None:
    assert parse_exit_file(data) == told
