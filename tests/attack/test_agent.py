"""Attacks on the engine's own processes inside: the agent and the minders of commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from attack.inside import alive, first_process, run
from smokebox.errors import SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

# What a hang would be. Answers come within milliseconds.
SOON = 15.0


@pytest.mark.parametrize("number", ["KILL", "SEGV", "TERM", "INT", "HUP"])
async def test_killing_ones_own_minder_is_an_error_and_no_more(
    sandbox: Sandbox, number: str
) -> None:
    async with asyncio.timeout(SOON):
        with contextlib.suppress(SandboxGone):
            await sandbox.exec(f"kill -{number} $PPID; sleep 1000", timeout=5)
    await alive(sandbox)
    left = await sandbox.exec("pgrep -c sleep")
    assert left.stdout == "0\n"


async def test_stopping_ones_own_minder_ends_with_the_timeout(sandbox: Sandbox) -> None:
    async with asyncio.timeout(18):
        with contextlib.suppress(SandboxGone):
            await sandbox.exec("while :; do kill -STOP $PPID; done", timeout=0.5)
    await alive(sandbox)


async def test_stopped_idle_minders_keep_nobody_waiting(sandbox: Sandbox, tier: str) -> None:
    await asyncio.gather(*(sandbox.exec(["sleep", "0.1"]) for _ in range(5)))
    await sandbox.exec(
        "(sleep 0.3; for p in /proc/[0-9]*; do n=${p#/proc/}; read -r c < $p/comm;"
        ' case "$c" in smokebox*|python*) [ $n = 1 ] || kill -STOP $n;; esac; done)'
        " >/dev/null 2>&1 &"
    )
    await asyncio.sleep(0.8)
    await alive(sandbox)


async def test_killing_everything_again_and_again(sandbox: Sandbox, neighbour: Sandbox) -> None:
    for _ in range(4):
        async with asyncio.timeout(SOON):
            with contextlib.suppress(SandboxGone):
                await sandbox.exec("kill -9 -1; sleep 1000", timeout=5)
    await alive(sandbox)
    await alive(neighbour)


@pytest.mark.usefixtures("kernel_of_the_host")
async def test_the_first_process_cannot_be_stopped_or_debugged(sandbox: Sandbox) -> None:
    answers = await run(
        sandbox,
        r"""
for number in range(1, 65):
    if number not in (17,):
        attempt(os.kill, 1, number)
tell([ask("ptrace", 16, 1, 0, 0), attempt(os.open, "/proc/1/mem", os.O_RDWR),
      attempt(write, "/proc/1/oom_score_adj", "1000"), attempt(write, "/proc/1/comm", "harm")])
""",
    )
    assert answers[:2] in (["EPERM", "EACCES"], ["ENOSYS", "EACCES"], ["EPERM", "EPERM"])
    await alive(sandbox)
    assert (await sandbox.info() or pytest.fail()).generation == 1


async def test_harming_the_first_process_ends_the_sandbox_and_no_more(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    """Where it can be: gVisor's kernel does not shield it."""
    before = await first_process(neighbour)
    for number in (9, 11, 15, 19):
        async with asyncio.timeout(SOON):
            with contextlib.suppress(SandboxGone):
                await sandbox.exec(["kill", f"-{number}", "1"], timeout=5)
        await alive(sandbox, within=SOON)
    await alive(neighbour)
    assert await first_process(neighbour) == before


async def test_limits_set_on_the_agent_cost_the_sandbox_and_no_more(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    """Root inside is who the agent is. One that cannot open anything ends, and all begins anew."""
    code = r"""
for pid in pids():
    if pid != os.getpid():
        for kind in range(16):
            ask("prlimit64", pid, kind, struct.pack("QQ", 0, 0), None)
time.sleep(0.2)
tell("set")
"""
    async with asyncio.timeout(18):
        with contextlib.suppress(SmokeboxError):
            await run(sandbox, code)
        with contextlib.suppress(SmokeboxError):
            await sandbox.exec(["true"], timeout=2)
        await alive(neighbour)
        await sandbox.sleep()
        await alive(sandbox)


async def test_there_is_no_way_to_the_control_sockets(sandbox: Sandbox, tier: str) -> None:
    """A forged end of a command would come by one: they are in no directory and no table."""
    answers = await run(
        sandbox,
        r"""
found = []
for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders[:] = [name for name in folders if name not in ("proc", "usr")]
    found += (f"{folder}/{name}" for name in names if name.endswith(".sock"))
sockets = [os.readlink(f"/proc/self/fd/{fd}") for fd in ("0", "1", "2")]
others = [pid for pid in pids() if pid != os.getpid()]
opened = []
for pid in others:
    try:
        held = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for fd in held:
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if "socket" in link:
            opened.append(attempt(os.open, f"/proc/{pid}/fd/{fd}", os.O_RDWR))
tell([found, sockets, [attempt(os.listdir, f"/proc/{pid}/fd") for pid in others], opened])
""",
    )
    assert answers[0] == []
    assert not any("socket" in link for link in answers[1])
    if tier == "namespaces":
        assert set(answers[2]) <= {"EACCES", "EPERM"}
    # In gVisor root sees that there are some, and gets none.
    assert "done" not in answers[3]


@pytest.mark.parametrize(
    "noise", ["X\\0\\0\\0\\0\\0", "F\\3\\0\\0\\0\\0", "XXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXX"]
)
async def test_output_that_looks_like_a_message_is_output(sandbox: Sandbox, noise: str) -> None:
    result = await sandbox.exec(f"printf '{noise}'; printf '{noise}' >&2; exit 7")
    assert result.exit_code == 7
    assert result.stdout == result.stderr
    assert result.stdout.startswith(noise[0])


async def test_a_background_process_that_keeps_the_pipes_does_not_keep_the_call(
    sandbox: Sandbox,
) -> None:
    async with asyncio.timeout(SOON):
        result = await sandbox.exec("(trap '' TERM; sleep 1000) & echo done")
    assert result.stdout == "done\n"


async def test_nothing_survives_its_timeout(sandbox: Sandbox) -> None:
    """By forks in a loop, each in a session of its own, faster than a list can be read."""
    code = r"""
import os, signal, sys
for number in range(1, 32):
    if number not in (9, 17, 19):
        signal.signal(number, signal.SIG_IGN)
while True:
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            for fd in range(3):
                os.close(fd)
            break
    else:
        os._exit(0)
"""
    box_limits = {"processes": 200} if os.geteuid() == 0 else None
    async with asyncio.timeout(18):
        await sandbox.exec(["python3", "-c", code], timeout=0.5, limits=box_limits)
    until = time.monotonic() + 10
    while (left := await _strays(sandbox)) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    await alive(sandbox)
    assert left == 0


async def _strays(sandbox: Sandbox) -> int:
    try:
        found = await sandbox.exec("pgrep -c -f set[s]id", timeout=5)
    except SmokeboxError:
        return -1
    return int(found.stdout or -1)


async def test_hostile_programs_and_variables_run_as_nothing_more(sandbox: Sandbox) -> None:
    """What a user's next command runs into is the sandbox's own affair, and stays there."""
    await sandbox.exec(
        "printf '#!/bin/sh\\nid -u; grep CapEff /proc/self/status; kill -9 $PPID\\n' > /tmp/evil;"
        " chmod +x /tmp/evil; for n in bash python3 ls; do"
        " cp --remove-destination /tmp/evil /usr/bin/$n; done;"
        " echo /tmp/lib.so > /etc/ld.so.preload"
    )
    async with asyncio.timeout(SOON):
        for command in ("ls", ["python3"], ["ls"]):
            with contextlib.suppress(SandboxGone):
                result = await sandbox.exec(
                    command, env={"LD_PRELOAD": "/tmp/x", "BASH_ENV": "/tmp/evil"}
                )
                assert "00000000000404fb" in result.stdout or result.exit_code != 0
        names = await sandbox.readdir("/tmp")
    assert "evil" in names
    await sandbox.destroy()
    await alive(sandbox)


async def test_a_session_cannot_be_talked_into_a_hang(sandbox: Sandbox) -> None:
    session = await sandbox.create_session()
    assert (await session.exec("echo one")).stdout == "one\n"
    noise = (
        "for f in /run/smokebox/*/* /proc/$$/fd/*; do (timeout 1 dd if=/dev/urandom of=$f bs=4096"
        " count=20 oflag=nonblock; true) >/dev/null 2>&1 & done; sleep 0.3;"
        " exec 3>&- 4>&- 5>&- 6>&-; trap - 39; kill -9 $PPID"
    )
    async with asyncio.timeout(18):
        for command in (noise, "exec true", "kill -STOP $$", "builtin eval 'while :; do :; done'"):
            with contextlib.suppress(SmokeboxError):
                await session.exec(command, timeout=1)
    await alive(sandbox)


async def test_many_threads_and_processes_leave_room_to_be_ended(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    code = r"""
import threading, time
try:
    while True:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
except RuntimeError:
    print("no more", flush=True)
time.sleep(1000)
"""
    async with asyncio.timeout(SOON):
        result = await sandbox.exec(["python3", "-c", code], timeout=2)
    assert result.timed_out
    await alive(neighbour)
    await alive(sandbox)
