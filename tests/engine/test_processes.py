"""Lasting processes: started, held, killed, found again after a crash, and forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.lasting_box import Box, open_box
from smokebox.engine import processes as processes_module
from smokebox.engine.endings import Exit, Told, is_held, parse
from smokebox.engine.jail import agent
from smokebox.engine.jail.api import JailState
from smokebox.engine.limits import ProcessLimits
from smokebox.engine.record_rows import ProcessRow, put
from smokebox.errors import (
    AccessDenied,
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    NotFound,
    PathNotFound,
    ProcessEnded,
    SandboxGone,
    SandboxRestarted,
    SmokeboxError,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def exit_of(code: int, killed: bool = False) -> Exit:
    return Exit(code=code, killed=killed)


SOURCE = Path(__file__).parents[2] / "src"
TESTS = Path(__file__).parents[1]


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with open_box(tmp_path) as box:
        yield box


async def rows(box: Box) -> list[ProcessRow]:
    return await box.record.rows(ProcessRow, "box")


def files(box: Box) -> set[str]:
    return set(os.listdir(f"{box.directory}/run")) - {"agent.sock", "io"}


def commands(box: Box) -> list[str]:
    """What runs in the sandbox besides its agent and minders, zombies not counted."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            same = os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(
                f"/proc/{box.jail.state.pid}/ns/pid"
            )
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if same and "State:\tZ" not in status and "smokebox" not in name:
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))
    return [line.decode().strip() for line in found if line.startswith((b"sleep", b"/bin", b"cat"))]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


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


@pytest.mark.parametrize(
    "options",
    [
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
    ],
)
async def test_bad_options_are_refused_by_name(box: Box, options: dict[str, Any]) -> None:
    command = options.pop("command", "true")
    with pytest.raises(InvalidOption) as caught:
        await box.processes.start(command, **options)
    assert caught.value.hint
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
    assert sorted(type(one).__name__ for one in both) == ["Conflict", "LastingProcess"]
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
    assert not process.gone and commands(box) == ["sleep 1001"]
    await process.kill()
    assert commands(box) == [] and process.gone
    assert process.status == "exited"


@pytest.mark.parametrize("name", ["SIGNOPE", "", 0, 65, -9, True, 1.5, "SIG_DFL"])
async def test_bad_signals_are_refused(box: Box, name: Any) -> None:
    process = await box.processes.start("sleep 9")
    with pytest.raises(InvalidOption, match="signal"):
        await process.kill(name)
    with pytest.raises(InvalidOption, match="grace"):
        await process.kill(grace=-1)


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


async def test_a_lifetime_ends_the_tree_with_124(box: Box) -> None:
    process = await box.processes.start("setsid sleep 1001 & sleep 1002", timeout=0.2)
    assert await process.wait_for_exit(10) == 124
    assert process.status == "killed"
    await eventually(lambda: commands(box) == [])


async def test_a_lifetime_holds_without_an_engine(box: Box) -> None:
    await box.processes.start("sleep 1001", process_id="job", timeout=0.3)
    await box.crash()
    process = await box.processes.get("job")
    assert await process.wait_for_exit(10) == 124


async def test_waiting_has_an_end(box: Box) -> None:
    process = await box.processes.start("sleep 99", process_id="slow")
    with pytest.raises(DeadlineExceeded, match=r"slow.*to end"):
        await process.wait_for_exit(0.05)
    assert process.status == "running"


async def test_stdin_is_read_line_by_line_until_it_is_closed(box: Box) -> None:
    process = await box.processes.start(["cat"], stdin=True)
    await process.write_stdin("one\n")
    await process.wait_for_log("one", 5)
    await process.write_stdin(b"\xc3\xa4\n")
    await process.close_stdin()
    await process.close_stdin()
    assert await process.wait_for_exit(5) == 0
    assert (await process.logs()).stdout == "one\nä\n"


async def test_more_than_a_pipe_holds_is_written_as_it_is_read(box: Box) -> None:
    process = await box.processes.start("sleep 0.2; wc -c", stdin=True)
    data = b"x" * (3 << 20)
    await asyncio.gather(process.write_stdin(data), process.write_stdin(data))
    await process.close_stdin()
    await process.wait_for_exit(10)
    assert (await process.logs()).stdout.strip() == str(2 * len(data))


async def test_stdin_of_a_process_without_one_is_refused(box: Box) -> None:
    process = await box.processes.start("cat; sleep 99")
    with pytest.raises(Unsupported, match="no stdin"):
        await process.write_stdin("x")
    with pytest.raises(Unsupported, match="no stdin"):
        await process.close_stdin()


async def test_writing_to_a_process_that_ends_says_so(box: Box) -> None:
    process = await box.processes.start("echo oops >&2; sleep 0.2; exit 5", stdin=True)
    with pytest.raises(ProcessEnded, match="oops") as caught:
        await process.write_stdin(b"x" * (1 << 20))
    assert caught.value.fields["exit_code"] == 5
    with pytest.raises(ProcessEnded):
        await process.write_stdin("more")


async def test_writing_to_a_stdin_that_was_closed_says_so(box: Box) -> None:
    process = await box.processes.start("exec 0<&-; echo up; sleep 99", stdin=True)
    await process.wait_for_log("up", 5)
    with pytest.raises(Unsupported, match="closed"):
        await process.write_stdin("x")
    other = await box.processes.start("cat; sleep 99", stdin=True)
    await other.close_stdin()
    with pytest.raises(Unsupported, match="closed"):
        await other.write_stdin("x")
    with pytest.raises(InvalidOption):
        await (await box.processes.start(["cat"], stdin=True)).write_stdin(7)  # type: ignore[arg-type]


async def test_a_process_that_kills_its_minder_is_lost_and_gone(box: Box) -> None:
    process = await box.processes.start("sleep 1001 & kill -9 $PPID; sleep 1002")
    assert await process.wait_for_exit(10) == 137
    assert process.status == "lost"
    await eventually(lambda: commands(box) == [])


async def test_a_stopped_minder_keeps_nobody_from_killing(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.lasting.KILL_SECONDS", 1.0)
    process = await box.processes.start("kill -STOP $PPID; echo up; exec sleep 1001")
    await eventually(lambda: commands(box) == ["sleep 1001"])
    await process.kill(grace=0.1)
    assert commands(box) == []
    assert await process.wait_for_exit(5) == 137


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


async def test_reading_about_ended_processes_does_not_wake_the_sandbox(box: Box) -> None:
    process = await box.processes.start("echo hi", process_id="job")
    await process.wait_for_exit(5)
    await box.sleep()
    await box.record.aclose()
    await box.open()

    def wake() -> Any:
        raise AssertionError("it was woken")

    box.processes._use = wake
    [found] = await box.processes.list()
    assert (found.status, (await found.logs()).stdout) == ("exited", "hi\n")
    assert [chunk.data async for chunk in found.stream_logs()] == ["hi\n"]
    assert await found.wait_for_exit() == 0
    await box.wake()


async def test_who_waits_when_the_sandbox_sleeps_hears_why(box: Box) -> None:
    process = await box.processes.start("echo hi; sleep 99", process_id="web", stdin=True)
    await process.wait_for_log("hi", 5)

    async def follow() -> None:
        async for _ in process.stream_logs():
            pass

    waits = [
        asyncio.create_task(process.wait_for_exit()),
        asyncio.create_task(process.wait_for_log("never")),
        asyncio.create_task(follow()),
    ]
    await asyncio.sleep(0.1)
    await box.sleep("it was idle")
    await asyncio.wait(waits)
    for wait in waits:
        with pytest.raises(SandboxRestarted, match="it was idle"):
            await wait
    assert (process.status, process.exit_code) == ("killed", 137)
    [row] = await rows(box)
    assert row.status == "killed"
    await box.wake()


async def test_a_handle_of_a_former_run_says_so_and_keeps_its_logs(box: Box) -> None:
    process = await box.processes.start("echo hi; sleep 99", process_id="web", stdin=True)
    await process.wait_for_log("hi", 5)
    await box.sleep()
    await box.wake()
    for call in (process.kill(), process.write_stdin("x"), process.close_stdin()):
        with pytest.raises(SandboxRestarted):
            await call
    assert (await process.logs()).stdout == "hi\n"
    assert (await box.processes.start("true")).generation == 2


async def test_who_waits_when_the_sandbox_is_destroyed_hears_that(box: Box) -> None:
    process = await box.processes.start("sleep 99")
    waiting = asyncio.create_task(process.wait_for_exit())
    await asyncio.sleep(0.02)
    await box.jail.kill()
    await box.processes.ended("it was destroyed", destroyed=True)
    with pytest.raises(SandboxGone, match="destroyed") as caught:
        await waiting
    assert not isinstance(caught.value, SandboxRestarted)


async def test_a_jail_that_dies_alone_is_noticed_by_its_processes(box: Box) -> None:
    process = await box.processes.start("sleep 99")
    os.kill(box.jail.state.pid, signal.SIGKILL)
    with pytest.raises(SandboxRestarted):
        await process.wait_for_exit(10)
    assert process.status == "killed"


async def test_after_a_crash_everything_goes_on(box: Box) -> None:
    await box.processes.start(
        'for i in $(seq 1 400); do echo $i; sleep 0.001; done; read l; echo "got $l"; exit 7',
        process_id="job",
        stdin=True,
    )
    await box.crash()
    process = await box.processes.get("job")
    assert process.status == "running"
    await process.write_stdin("word\n")
    await process.wait_for_log("got word", 10)
    assert await process.wait_for_exit(5) == 7
    expected = "".join(f"{number}\n" for number in range(1, 401)) + "got word\n"
    assert (await process.logs()).stdout == expected


async def test_after_a_crash_trees_can_be_killed(box: Box) -> None:
    await box.processes.start("setsid sleep 1001 & sleep 1002", process_id="a")
    left = await box.processes.start("sleep 1003 & true", process_id="b")
    await left.wait_for_exit(5)
    await eventually(lambda: len(commands(box)) >= 3)
    await box.crash()
    assert (await box.processes.get("b")).status == "exited"
    assert await box.processes.kill_all() == 2
    assert commands(box) == []


async def test_what_ended_while_there_was_no_engine_is_found_out(box: Box) -> None:
    process = await box.processes.start("sleep 0.1; exit 6", process_id="job")
    process.close()
    await eventually(lambda: not is_held(f"{box.directory}/run/job.exit"))
    await box.crash()
    found = await box.processes.get("job")
    assert (found.status, found.exit_code) == ("exited", 6)
    await box.processes.aclose()
    assert (await rows(box))[0].exit_code == 6


async def test_a_start_that_the_crash_cut_short_leaves_nothing(box: Box) -> None:
    row = ProcessRow(
        sandbox_id="box",
        process_id="half",
        generation=1,
        command="x",
        argv=("x",),
        cwd="/",
        user="root",
        started_at=1.0,
    )
    await box.record.write(put(row))
    for suffix in (".out", ".exit"):
        os.mknod(f"{box.directory}/run/half{suffix}")
    await box.crash()
    await asyncio.sleep(0.4)
    assert await box.processes.list() == []
    await box.processes.aclose()
    assert (await rows(box), files(box)) == ([], set())


async def test_a_start_that_the_crash_cut_after_the_process_began_is_taken_over(box: Box) -> None:
    process = await box.processes.start("sleep 1001", process_id="job")
    await box.record.write(put(replace(process.row, status="starting", pid=None)))
    await box.crash()
    found = await box.processes.get("job")
    assert (found.status, found.pid) == ("running", process.pid)
    await found.kill()
    assert commands(box) == []


CRASH = """
import asyncio, dataclasses, json, os, sys
from pathlib import Path
from engine.lasting_box import Box, lay_skeleton

async def main(home, key):
    lay_skeleton(home)
    box = Box(home, key)
    await box.create()
    await box.processes.start(
        "for i in $(seq 1 300); do echo $i; sleep 0.002; done; cat; exit 9",
        process_id="job", stdin=True)
    ended = await box.processes.start("echo done", process_id="ended")
    await ended.wait_for_exit(5)
    print(json.dumps(dataclasses.asdict(box.jail.state)), flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""

CHECK = """
import asyncio, json, os, sys
from pathlib import Path
from engine.lasting_box import Box
from smokebox.engine.jail.api import JailState

async def main(home, key, state):
    box = Box(home, key)
    await box.adopt(JailState(**json.loads(state)))
    job, ended = await box.processes.get("job"), await box.processes.get("ended")
    assert (job.status, ended.status, ended.exit_code) == ("running", "exited", 0)
    await job.write_stdin("last\\n")
    await job.close_stdin()
    assert await job.wait_for_exit(10) == 9
    text = "".join([chunk.data async for chunk in job.stream_logs()])
    assert text == "".join(f"{n}\\n" for n in range(1, 301)) + "last\\n", text[-200:]
    other = await box.processes.start("echo x >/dev/stderr; setsid sleep 99 & sleep 99")
    await other.wait_for_log("x", 5)
    await other.kill()
    assert other.gone
    await box.aclose()
    print("good")

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


@pytest.mark.parametrize("who", ["root", "nobody"])
def test_another_engine_takes_over_from_one_that_was_killed(who: str) -> None:
    """Both in processes of their own, as root and as an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("only root can be both kinds of user")
    uid = pwd.getpwnam(who).pw_uid
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
    home = tempfile.mkdtemp(dir="/tmp", prefix="smokebox-crash-")
    os.chown(home, uid, uid)
    python = [*drop, "/usr/bin/python3" if uid else sys.executable, "-c"]
    words = [home, f"t{os.getpid()}{who}"]
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{TESTS}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        crashed = subprocess.run(
            [*python, CRASH, *words], env=env, capture_output=True, text=True, check=False
        )
        assert crashed.returncode == -9, crashed.stderr
        state = crashed.stdout.strip()
        check = subprocess.run(
            [*python, CHECK, *words, state], env=env, capture_output=True, text=True, check=False
        )
        with contextlib.suppress(ProcessLookupError):
            if check.returncode:
                os.kill(JailState(**json.loads(state)).pid, signal.SIGKILL)
        assert check.stdout == "good\n", check.stderr
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", home], check=True)
        shutil.rmtree(home)


BEGUN = agent.BEGUN.pack(b"S", 7, 6)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", Told()),
        (b"S", Told()),
        (BEGUN, Told(leader=7, minder=6)),
        (agent.BEGUN.pack(b"S", -1, 6), Told()),
        (agent.BEGUN.pack(b"S", 7, 1), Told()),
        (b"\xff" * 99, Told()),
        (BEGUN + agent.EXIT.pack(b"X", 0x300), Told(leader=7, minder=6, exit=exit_of(3))),
        (BEGUN + agent.EXIT.pack(b"X", 9), Told(leader=7, minder=6, exit=exit_of(137, True))),
        (BEGUN + agent.EXIT.pack(b"T", 0), Told(leader=7, minder=6, exit=exit_of(124, True))),
        (BEGUN + agent.EXIT.pack(b"X", -5), Told(leader=7, minder=6, exit=exit_of(255))),
        (BEGUN + agent.EXIT.pack(b"?", 0), Told(leader=7, minder=6, exit=exit_of(255))),
        (BEGUN + b"X\0", Told(leader=7, minder=6)),
    ],
)
def test_what_a_minder_tells_is_checked(data: bytes, told: Told) -> None:
    assert parse(data) == told
