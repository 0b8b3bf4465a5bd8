"""Background processes: start, exit, kill, limits and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from engine.awake_sandbox import (
    AwakeSandbox,
    command_lines,
    eventually,
    open_sandbox,
    process_files,
    process_rows,
)
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
async def sandbox(tmp_path: Path) -> AsyncIterator[AwakeSandbox]:
    async with open_sandbox(tmp_path) as sandbox:
        yield sandbox


async def test_started_process_runs_and_is_recorded(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 100", process_id="web")
    assert (process.id, process.status, process.row.command) == ("web", "running", "sleep 100")
    assert process.exit_code is None
    [row] = await process_rows(sandbox)
    assert (row.process_id, row.status, row.pid) == ("web", "running", process.pid)
    assert await sandbox.processes.get("web") is process


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
async def test_exit_is_noticed_and_recorded(
    sandbox: AwakeSandbox, command: str | list[str], status: str, code: int
) -> None:
    process = await sandbox.processes.start(command)
    assert await process.wait_for_exit(10) == code
    assert (process.status, process.exit_code) == (status, code)
    assert process.row.ended_at is not None and process.row.ended_at >= process.row.started_at
    await sandbox.processes.aclose()
    [row] = await process_rows(sandbox)
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
async def test_failed_start_leaves_nothing(
    sandbox: AwakeSandbox, command: str | list[str], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await sandbox.processes.start(command, **options)
    assert (
        await process_rows(sandbox),
        process_files(sandbox),
        await sandbox.processes.list(),
    ) == ([], set(), [])


async def test_invalid_options_are_refused_by_name(sandbox: AwakeSandbox) -> None:
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
            await sandbox.processes.start(**{"command": "true", **options})
        assert caught.value.hint and caught.value.fields["option"] == name
    assert await process_rows(sandbox) == []


async def test_process_id_is_taken_until_cleanup(sandbox: AwakeSandbox) -> None:
    first = await sandbox.processes.start("true", process_id="job")
    with pytest.raises(Conflict, match="job"):
        await sandbox.processes.start("true", process_id="job")
    await first.kill()
    await first.wait_for_exit(5)
    await eventually(lambda: first.tree_ended)
    assert await sandbox.processes.cleanup() == 1
    assert (await sandbox.processes.start("true", process_id="job")).id == "job"


async def test_one_of_two_concurrent_starts_with_the_same_id_wins(sandbox: AwakeSandbox) -> None:
    both = await asyncio.gather(
        *(sandbox.processes.start("sleep 9", process_id="one") for _ in range(2)),
        return_exceptions=True,
    )
    assert sorted(type(one).__name__ for one in both) == ["BackgroundProcess", "Conflict"]
    assert len(await process_rows(sandbox)) == 1


async def test_options_reach_the_process(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        'echo "$PWD $A"; ulimit -n',
        cwd="/tmp",
        env={"A": "b c"},
        limits=ProcessLimits(open_files=77),
    )
    await process.wait_for_exit(5)
    assert (await process.logs()).stdout == "/tmp b c\n77\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")
async def test_another_user_can_open_its_stdin_and_stdout_by_name(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "id -u; read line </dev/stdin; echo $line >/dev/stdout; echo err >/dev/stderr",
        user="alice",
        stdin=True,
    )
    await process.write_stdin("hello\n")
    assert await process.wait_for_exit(5) == 0
    logs = await process.logs()
    assert (logs.stdout, logs.stderr) == ("1000\nhello\n", "err\n")


async def test_opening_dev_stdout_does_not_empty_the_log(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("echo a; echo b >/dev/stdout; echo c; : >/dev/stdout")
    await process.wait_for_exit(5)
    assert (await process.logs()).stdout == "a\nb\nc\n"


async def test_kill_waits_for_the_whole_tree_including_daemons(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "setsid sleep 1001 & (setsid sh -c 'setsid sleep 1002 & sleep 1003' &) ; sleep 1004"
    )
    await eventually(lambda: len(command_lines(sandbox)) >= 4)
    await process.kill()
    assert command_lines(sandbox) == []
    assert (process.status, process.exit_code, process.tree_ended) == ("killed", 143, True)


async def test_kill_sends_sigkill_after_the_grace_period(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("trap '' TERM; echo ready; while :; do sleep 1; done")
    await process.wait_for_log("ready", 5)
    await process.kill(grace=0.2)
    assert (process.status, process.exit_code, command_lines(sandbox)) == ("killed", 137, [])


async def test_process_that_handles_sigterm_has_exited(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "trap 'echo bye; exit 0' TERM; echo up; sleep 99 & wait"
    )
    await process.wait_for_log("up", 5)
    await process.kill()
    assert (process.status, process.exit_code) == ("exited", 0)
    assert (await process.logs()).stdout == "up\nbye\n"


@pytest.mark.parametrize("name", ["SIGUSR1", "usr1", 10, signal.SIGUSR1])
async def test_explicit_signal_is_only_sent(sandbox: AwakeSandbox, name: str | int) -> None:
    process = await sandbox.processes.start(
        "trap 'echo got' USR1; echo up; while :; do sleep 0.05; done"
    )
    await process.wait_for_log("up", 5)
    await process.kill(name)
    await process.wait_for_log("got", 5)
    assert process.status == "running"


async def test_killing_an_ended_process_does_nothing(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("exit 4")
    await process.wait_for_exit(5)
    await process.kill()
    await process.kill("SIGKILL")
    assert (process.status, process.exit_code) == ("exited", 4)


async def test_kill_after_the_exit_kills_background_processes(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 1001 & exit 0")
    assert await process.wait_for_exit(5) == 0
    await eventually(lambda: command_lines(sandbox) == ["sleep 1001"])
    assert not process.tree_ended
    await process.kill()
    assert command_lines(sandbox) == [] and process.tree_ended
    assert process.status == "exited"


async def test_invalid_signals_are_refused(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 9")
    bad: list[Any] = ["SIGNOPE", "", 0, 65, -9, True, 1.5, "SIG_DFL"]
    for name in bad:
        with pytest.raises(InvalidOption, match="signal"):
            await process.kill(name)
    with pytest.raises(InvalidOption, match="grace"):
        await process.kill(grace=-1)
    assert process.status == "running"


async def test_unknown_process_is_not_found(sandbox: AwakeSandbox) -> None:
    with pytest.raises(NotFound, match="nosuch"):
        await sandbox.processes.get("nosuch")
    with pytest.raises(NotFound, match="nosuch"):
        await sandbox.processes.kill("nosuch")


async def test_kill_all_counts_and_kills_twenty_processes(sandbox: AwakeSandbox) -> None:
    started = await asyncio.gather(*(sandbox.processes.start(f"sleep 10{i:02}") for i in range(20)))
    assert len({process.pid for process in started}) == 20
    assert len(await sandbox.processes.list()) == 20
    assert await sandbox.processes.kill_all() == 20
    assert command_lines(sandbox) == []
    assert {process.status for process in started} == {"killed"}
    assert await sandbox.processes.kill_all() == 0


async def test_kill_all_does_not_count_ended_processes(sandbox: AwakeSandbox) -> None:
    """Also while the supervisor is still running."""
    for _ in range(20):
        process = await sandbox.processes.start("true")
        await process.wait_for_exit(10)
        assert await sandbox.processes.kill_all() == 0
        assert process.tree_ended


async def test_kill_all_counts_background_processes_of_an_ended_process(
    sandbox: AwakeSandbox,
) -> None:
    process = await sandbox.processes.start("sleep 1001 & true")
    await process.wait_for_exit(10)
    assert await sandbox.processes.kill_all() == 1
    assert command_lines(sandbox) == []


async def test_timeout_kills_the_tree_with_exit_code_124(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("setsid sleep 1001 & sleep 1002", timeout=0.2)
    assert await process.wait_for_exit(10) == 124
    assert process.status == "killed"
    await eventually(lambda: command_lines(sandbox) == [])


async def test_wait_for_exit_times_out(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 99", process_id="slow")
    with pytest.raises(DeadlineExceeded, match=r"slow.*for it to end"):
        await process.wait_for_exit(0.05)
    assert process.status == "running"


async def test_process_that_kills_its_supervisor_is_lost_and_killed(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "read go; sleep 1001 & kill -9 $PPID; sleep 1002", stdin=True
    )
    await process.write_stdin("go\n")
    assert await process.wait_for_exit(10) == 137
    assert process.status == "lost"
    await eventually(lambda: command_lines(sandbox) == [])


async def test_kill_works_with_a_stopped_supervisor(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "read go; kill -STOP $PPID; exec sleep 1001", stdin=True
    )
    await process.write_stdin("go\n")
    await eventually(lambda: command_lines(sandbox) == ["sleep 1001"])
    await process.kill(grace=0.1)
    assert command_lines(sandbox) == []
    assert process.exit_code == 143


async def test_process_that_stops_its_supervisor_during_the_start_is_killed(
    sandbox: AwakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.jail.guest_requests.RESPONSE_SECONDS", 1.0)
    with contextlib.suppress(SandboxGone):
        process = await sandbox.processes.start("kill -STOP $PPID; sleep 1001")
        await process.kill(grace=0)
    await sandbox.processes.cleanup()
    await eventually(lambda: command_lines(sandbox) == [])
    assert (await process_rows(sandbox), process_files(sandbox)) == ([], set())


async def test_sandbox_cannot_reach_log_and_exit_files(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "ls -l /proc/$PPID/fd; ls -l /proc/self/fd | grep -c -E 'run|[.](out|err|exit)'"
    )
    assert await process.wait_for_exit(5) == 1
    logs = await process.logs()
    assert logs.stdout == "0\n" and "denied" in logs.stderr


async def test_ended_processes_are_kept_up_to_a_count(
    sandbox: AwakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "MAX_ENDED", 3)
    for number in range(6):
        process = await sandbox.processes.start("true", process_id=f"job{number}")
        await eventually(lambda process=process: process.tree_ended)  # type: ignore[misc]
    await sandbox.processes.aclose()
    assert [one.id for one in await sandbox.processes.list()] == ["job3", "job4", "job5"]
    assert len(await process_rows(sandbox)) == 3
    assert {name.partition(".")[0] for name in process_files(sandbox)} == {"job3", "job4", "job5"}


async def test_ended_processes_are_kept_up_to_a_log_size(
    sandbox: AwakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "MAX_LOG_BYTES", 100 << 10)
    for number in range(3):
        process = await sandbox.processes.start(
            ["head", "-c64000", "/dev/zero"], process_id=f"j{number}"
        )
        await eventually(lambda process=process: process.tree_ended)  # type: ignore[misc]
    await sandbox.processes.aclose()
    assert [one.id for one in await sandbox.processes.list()] == ["j2"]


async def test_cleanup_keeps_processes_with_a_running_tree(sandbox: AwakeSandbox) -> None:
    running = await sandbox.processes.start("sleep 99")
    left = await sandbox.processes.start("sleep 98 & true")
    ended = await sandbox.processes.start("true")
    for process in (left, ended):
        await process.wait_for_exit(5)
    await eventually(lambda: ended.tree_ended)
    assert await sandbox.processes.cleanup() == 1
    assert {one.id for one in await sandbox.processes.list()} == {running.id, left.id}


async def test_cancelled_start_is_undone(sandbox: AwakeSandbox) -> None:
    for delay in (0.0, 0.002, 0.004, 0.008):
        starting = asyncio.create_task(sandbox.processes.start("sleep 1001"))
        await asyncio.sleep(delay)
        starting.cancel()
        done = await asyncio.wait([starting])
        if not next(iter(done[0])).cancelled():
            await starting.result().kill()
    await sandbox.processes.aclose()
    await sandbox.processes.cleanup()
    assert (command_lines(sandbox), await process_rows(sandbox), process_files(sandbox)) == (
        [],
        [],
        set(),
    )


async def test_waiting_and_following_keep_the_sandbox_awake(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 99")
    assert sandbox.uses == 0
    waiting = asyncio.create_task(process.wait_for_exit())
    following = asyncio.create_task(anext(process.stream_logs(), None))
    await asyncio.sleep(0.05)
    assert sandbox.uses == 2
    await process.kill()
    await asyncio.wait([waiting, following])
    assert sandbox.uses == 0


STARTED = guest_init.START_RECORD.pack(b"S", 7, 6)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ExitRecord()),
        (b"S", ExitRecord()),
        (STARTED, ExitRecord(leader=7, supervisor_pid=6)),
        (guest_init.START_RECORD.pack(b"S", 0, 6), ExitRecord(supervisor_pid=6)),
        (
            guest_init.START_RECORD.pack(b"S", -1, 6) + guest_init.EXIT_RECORD.pack(b"X", 0),
            ExitRecord(supervisor_pid=6),
        ),
        (guest_init.START_RECORD.pack(b"S", 7, 1), ExitRecord()),
        (b"\xff" * 99, ExitRecord()),
        (
            STARTED + guest_init.EXIT_RECORD.pack(b"X", 0x300),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(3)),
        ),
        (
            STARTED + guest_init.EXIT_RECORD.pack(b"X", 9),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(137, True)),
        ),
        (
            STARTED + guest_init.EXIT_RECORD.pack(b"T", 0),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(124, True)),
        ),
        (
            STARTED + guest_init.EXIT_RECORD.pack(b"X", -5),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(255)),
        ),
        (
            STARTED + guest_init.EXIT_RECORD.pack(b"?", 0),
            ExitRecord(leader=7, supervisor_pid=6, exit=exit_of(255)),
        ),
        (STARTED + b"X\0", ExitRecord(leader=7, supervisor_pid=6)),
    ],
)
def test_exit_file_is_validated(data: bytes, expected: ExitRecord) -> None:
    assert parse_exit_file(data) == expected
