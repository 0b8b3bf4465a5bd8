"""Attacks on the engine's processes inside: guest init and the supervisors of commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import check_alive, guest_init_pid, run
from smokebox.engine.jail import guest_requests
from smokebox.errors import SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

# Longer means that the call hangs.
HANG_SECONDS = 15.0


@pytest.mark.parametrize("number", ["KILL", "SEGV", "TERM", "INT", "HUP"])
async def test_killing_the_supervisor_ends_only_its_command(sandbox: Sandbox, number: str) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        with contextlib.suppress(SandboxGone):
            await sandbox.exec(f"kill -{number} $PPID; sleep 1000", timeout=5)
    await check_alive(sandbox)
    sleepers = await sandbox.exec("pgrep -c sleep")
    assert sleepers.stdout == "0\n"


async def test_stopping_the_supervisor_ends_with_the_timeout(sandbox: Sandbox) -> None:
    async with asyncio.timeout(18):
        with contextlib.suppress(SandboxGone):
            await sandbox.exec("while :; do kill -STOP $PPID; done", timeout=0.5)
    await check_alive(sandbox)


async def test_stopped_idle_supervisors_are_continued(sandbox: Sandbox, tier: str) -> None:
    await asyncio.gather(*(sandbox.exec(["sleep", "0.1"]) for _ in range(5)))
    await sandbox.exec(
        "(sleep 0.3; for p in /proc/[0-9]*; do n=${p#/proc/}; read -r c < $p/comm;"
        ' case "$c" in smokebox*|python*) [ $n = 1 ] || kill -STOP $n;; esac; done)'
        " >/dev/null 2>&1 &"
    )
    await asyncio.sleep(0.8)
    await check_alive(sandbox)


async def test_killing_all_processes_repeatedly(sandbox: Sandbox, neighbour: Sandbox) -> None:
    for _ in range(4):
        async with asyncio.timeout(HANG_SECONDS):
            with contextlib.suppress(SandboxGone):
                await sandbox.exec("kill -9 -1; sleep 1000", timeout=5)
    await check_alive(sandbox)
    await check_alive(neighbour)


@pytest.mark.usefixtures("host_kernel")
async def test_guest_init_cannot_be_stopped_or_debugged(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
for number in range(1, 65):
    if number not in (17,):
        attempt(os.kill, 1, number)
output([syscall("ptrace", 16, 1, 0, 0), attempt(os.open, "/proc/1/mem", os.O_RDWR),
      attempt(write, "/proc/1/oom_score_adj", "1000"), attempt(write, "/proc/1/comm", "changed")])
""",
    )
    assert results[:2] in (["EPERM", "EACCES"], ["ENOSYS", "EACCES"], ["EPERM", "EPERM"])
    await check_alive(sandbox)
    assert (await sandbox.info() or pytest.fail()).generation == 1


async def test_killing_guest_init_ends_only_its_sandbox(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    """It can be killed in gVisor, whose kernel does not protect pid 1."""
    before = await guest_init_pid(neighbour)
    for number in (9, 11, 15, 19):
        async with asyncio.timeout(HANG_SECONDS):
            with contextlib.suppress(SandboxGone):
                await sandbox.exec(["kill", f"-{number}", "1"], timeout=5)
        await check_alive(sandbox, within=HANG_SECONDS)
    await check_alive(neighbour)
    assert await guest_init_pid(neighbour) == before


async def test_limiting_guest_init_ends_only_its_sandbox(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    """Guest init runs as root inside. If it cannot open files it exits, and the sandbox ends."""
    code = r"""
for pid in pids():
    if pid != os.getpid():
        for kind in range(16):
            syscall("prlimit64", pid, kind, struct.pack("QQ", 0, 0), None)
time.sleep(0.2)
output("done")
"""
    async with asyncio.timeout(18):
        with contextlib.suppress(SmokeboxError):
            await run(sandbox, code)
        with contextlib.suppress(SmokeboxError):
            await sandbox.exec(["true"], timeout=2)
        await check_alive(neighbour)
        await sandbox.sleep()
        await check_alive(sandbox)


async def test_control_sockets_cannot_be_opened(sandbox: Sandbox, tier: str) -> None:
    """Through one, a process could forge the exit of a command."""
    results = await run(
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
output([found, sockets, [attempt(os.listdir, f"/proc/{pid}/fd") for pid in others], opened])
""",
    )
    assert results[0] == []
    assert not any("socket" in link for link in results[1])
    if tier == "namespaces":
        assert set(results[2]) <= {"EACCES", "EPERM"}
    # In gVisor root can list them, but not open them.
    assert "done" not in results[3]


@pytest.mark.parametrize(
    "noise", ["X\\0\\0\\0\\0\\0", "F\\3\\0\\0\\0\\0", "XXXXXXXXXXXXXXXXXXXXXXXXXXXXXXXX"]
)
async def test_output_that_looks_like_a_message_is_output(sandbox: Sandbox, noise: str) -> None:
    result = await sandbox.exec(f"printf '{noise}'; printf '{noise}' >&2; exit 7")
    assert result.exit_code == 7
    assert result.stdout == result.stderr
    assert result.stdout.startswith(noise[0])


async def test_background_process_with_open_pipes_does_not_block(
    sandbox: Sandbox,
) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        result = await sandbox.exec("(trap '' TERM; sleep 1000) & echo done")
    assert result.stdout == "done\n"


async def test_nothing_survives_a_timeout(sandbox: Sandbox) -> None:
    """The processes fork in a loop into new sessions, faster than they can be listed."""
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
    limits = {"processes": 200} if os.geteuid() == 0 else None
    async with asyncio.timeout(18):
        await sandbox.exec(["python3", "-c", code], timeout=0.5, limits=limits)
    until = time.monotonic() + 10
    while (left := await _survivors(sandbox)) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    await check_alive(sandbox)
    assert left == 0


async def _survivors(sandbox: Sandbox) -> int:
    try:
        found = await sandbox.exec("pgrep -c -f set[s]id", timeout=5)
    except SmokeboxError:
        return -1
    return int(found.stdout or -1)


async def test_replaced_programs_and_variables_gain_nothing(sandbox: Sandbox) -> None:
    """The next command may run into them, but only inside."""
    await sandbox.exec(
        "printf '#!/bin/sh\\nid -u; grep CapEff /proc/self/status; kill -9 $PPID\\n' > /tmp/evil;"
        " chmod +x /tmp/evil; for n in bash python3 ls; do"
        " cp --remove-destination /tmp/evil /usr/bin/$n; done;"
        " echo /tmp/lib.so > /etc/ld.so.preload"
    )
    async with asyncio.timeout(HANG_SECONDS):
        for command in ("ls", ["python3"], ["ls"]):
            with contextlib.suppress(SandboxGone):
                result = await sandbox.exec(
                    command, env={"LD_PRELOAD": "/tmp/x", "BASH_ENV": "/tmp/evil"}
                )
                assert "00000000000404fb" in result.stdout or result.exit_code != 0
        names = await sandbox.readdir("/tmp")
    assert "evil" in names
    await sandbox.destroy()
    await check_alive(sandbox)


async def test_session_cannot_be_made_to_hang(sandbox: Sandbox) -> None:
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
    await check_alive(sandbox)


async def test_thread_bomb_can_be_killed(sandbox: Sandbox, neighbour: Sandbox) -> None:
    code = r"""
import threading, time
try:
    while True:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
except RuntimeError:
    print("limit", flush=True)
time.sleep(1000)
"""
    async with asyncio.timeout(HANG_SECONDS):
        result = await sandbox.exec(["python3", "-c", code], timeout=2)
    assert result.timed_out
    await check_alive(neighbour)
    await check_alive(sandbox)


@pytest.mark.usefixtures("host_kernel")
async def test_blocking_egress_sockets_do_not_block_the_engine(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    """Guest init has the sockets of the egress proxy too, and their flags are shared."""
    assert sandbox.lifecycle.run is not None
    shared = await guest_requests.egress_sockets(sandbox.lifecycle.run.jail)
    connect = """
import socket
for family, kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM)):
    with socket.socket(family, kind) as sock:
        sock.settimeout(1)
        try:
            sock.connect(("1.2.3.4", 53))
            sock.send(b"query")
            sock.recv(10)
        except OSError:
            pass
"""
    with contextlib.closing(shared):
        for sock in shared.sockets:
            sock.setblocking(True)
        async with asyncio.timeout(HANG_SECONDS):
            await asyncio.gather(*(sandbox.exec(["python3", "-c", connect]) for _ in range(3)))
            for sock in shared.sockets:
                sock.setblocking(True)
            await sandbox.exec(["python3", "-c", connect])
        await check_alive(neighbour)
