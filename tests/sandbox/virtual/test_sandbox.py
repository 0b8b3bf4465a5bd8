"""Options of `virtual()`, behaviour beyond the conformance suite, and closing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from smokebox import SandboxApi, virtual
from smokebox.errors import (
    FileTooLarge,
    InvalidOption,
    PathError,
    PathNotDirectory,
    PathNotFound,
    SandboxGone,
)
from smokebox.sandbox.filesystems.memory import MemoryFilesystem

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.sandbox.virtual.command import CommandCall


async def test_virtual_sandbox_satisfies_the_contract() -> None:
    assert isinstance(virtual(), SandboxApi)


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(InvalidOption) as caught:
        virtual(file={})  # type: ignore[call-arg]
    assert caught.value.nearest == "files"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("files", ["a"]),
        ("files", {"a": 3}),
        ("mounts", "folder"),
        ("mounts", {"/data": 3}),
        ("mounts", {"data": "."}),
        ("mounts", {"/": "."}),
        ("limits", 3),
        ("shell", "zsh"),
        ("isolation", "docker"),
        ("user", "Not A User"),
        ("env", {"A-B": "c"}),
        ("commands", {"if": print}),
        ("network", 5),
    ],
)
def test_invalid_option_is_refused_at_once(option: str, value: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        virtual(**{option: value})  # type: ignore[arg-type]
    assert caught.value.hint


async def test_files_are_text_or_bytes_at_relative_or_absolute_paths() -> None:
    sandbox = virtual(files={"a.txt": "héllo", "/data/b.bin": b"\xff\x00"})
    assert (await sandbox.exec("cat a.txt")).stdout == "héllo"
    assert await sandbox.read_bytes("/data/b.bin") == b"\xff\x00"


async def test_file_that_is_too_large_is_refused() -> None:
    with pytest.raises(FileTooLarge):
        await virtual(files={"big": b"x" * 10_000_001}).exec("true")


async def test_conflicting_files_are_refused() -> None:
    with pytest.raises(PathError):
        await virtual(files={"/a": "file", "/a/b": "below it"}).readdir("/")


async def test_lazy_file_is_listed_at_once_and_loaded_once() -> None:
    loads: list[str] = []

    def load() -> str:
        loads.append("loaded")
        return "content\n"

    sandbox = virtual(files={"lazy.txt": load})
    assert (await sandbox.exec("ls")).stdout == "lazy.txt\n"
    assert (await sandbox.stat("lazy.txt")).is_file
    assert loads == []
    assert (await sandbox.exec("cat lazy.txt lazy.txt")).stdout == "content\ncontent\n"
    assert await sandbox.read_file("lazy.txt") == "content\n"
    assert loads == ["loaded"]
    assert (await sandbox.stat("lazy.txt")).size == 8


async def test_async_loader_runs_on_the_loop_of_the_caller() -> None:
    seen: list[asyncio.AbstractEventLoop] = []

    async def load() -> bytes:
        await asyncio.sleep(0.01)
        seen.append(asyncio.get_running_loop())
        return b"loaded\n"

    sandbox = virtual(files={"a": load, "b": load})
    assert (await sandbox.exec("cat a")).stdout == "loaded\n"
    assert await sandbox.read_file("b") == "loaded\n"
    assert seen == [asyncio.get_running_loop()] * 2


async def test_failed_loader_is_reported_on_read() -> None:
    def load() -> str:
        raise RuntimeError("no such record")

    sandbox = virtual(files={"lazy": load})
    result = await sandbox.exec("cat lazy; echo after")
    assert result.stdout == "after\n"
    assert "lazy" in result.stderr
    with pytest.raises(PathError, match="no such record"):
        await sandbox.read_file("lazy")


async def test_lazy_file_can_be_moved_and_removed() -> None:
    sandbox = virtual(files={"d/lazy": lambda: "late", "gone": lambda: "never"})
    result = await sandbox.exec("mv d e; rm gone; echo mine > gone; cat e/lazy gone; ls")
    assert result.stdout == "latemine\ne\ngone\n"


async def test_writing_to_a_lazy_file_replaces_it_and_appending_loads_it() -> None:
    sandbox = virtual(files={"a": lambda: "old", "b": lambda: "old"})
    await sandbox.write_file("a", "mine")
    assert (await sandbox.exec("printf +more >> b; cat a b")).stdout == "mineold+more"


async def test_folder_of_the_host_is_mounted_read_only(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("from the host\n")
    async with virtual(mounts={"/host": tmp_path}) as sandbox:
        assert (await sandbox.exec("cat /host/f; ls /")).stdout.startswith("from the host\n")
        assert (await sandbox.exec("echo x > /host/g")).exit_code != 0
        assert await sandbox.readdir("/host") == ["f"]
    assert os.listdir(tmp_path) == ["f"]


async def test_any_filesystem_can_be_mounted_and_shared() -> None:
    shared = MemoryFilesystem()
    one, two = virtual(mounts={"/shared": shared}), virtual(mounts={"/shared": shared})
    await one.exec("echo hello > /shared/note")
    assert (await two.exec("cat /shared/note")).stdout == "hello\n"


def test_missing_folder_is_refused_at_creation(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound):
        virtual(mounts={"/data": tmp_path / "nope"})
    (tmp_path / "file").write_text("")
    with pytest.raises(PathNotDirectory):
        virtual(mounts={"/data": tmp_path / "file"})


def test_file_hidden_by_a_mount_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="hidden"):
        virtual(files={"/data/a": "x"}, mounts={"/data": tmp_path})


async def test_cwd_missing_from_its_mount_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound):
        await virtual(cwd="/data/nope", mounts={"/data": tmp_path}).exec("true")


async def test_cwd_env_and_user() -> None:
    sandbox = virtual(cwd="/srv/app", env={"STAGE": "test"}, user="ada")
    result = await sandbox.exec('echo "$PWD $STAGE $HOME $USER $(whoami) $(hostname)"; env')
    assert result.stdout.startswith("/srv/app test /home/ada ada ada smokebox\n")
    assert "BASHKIT" not in result.stdout


async def test_host_files_and_variables_are_invisible() -> None:
    sandbox = virtual()
    result = await sandbox.exec("cat /etc/passwd; cat /proc/self/environ; echo $PYTHONPATH $SHLVL")
    assert result.stdout.startswith("root:x:0:0")
    assert len(result.stdout.splitlines()) == 3


async def test_python_is_available_when_enabled() -> None:
    assert (await virtual().exec("python3 -c 'print(1)'")).exit_code == 127
    sandbox = virtual(python=True)
    assert (await sandbox.exec("python3 -c 'print(6 * 7)'")).stdout == "42\n"
    assert "python3" in ((await sandbox.capabilities()).commands or ())


async def test_sqlite_is_available() -> None:
    assert (await virtual().exec("sqlite3 :memory: 'select 6 * 7'")).stdout == "42\n"


async def test_python_commands_run() -> None:
    def greet(call: CommandCall) -> str:
        return f"hello {' '.join(call.args)}\n"

    sandbox = virtual(commands={"greet": greet})
    result = await sandbox.exec("command -v greet && greet you | tr a-z A-Z")
    assert result.stdout == "/usr/bin/greet\nHELLO YOU\n"
    assert "greet" in ((await sandbox.capabilities()).commands or ())


async def test_shells_can_be_called_by_path() -> None:
    sandbox = virtual()
    script = '#!/usr/bin/env bash\necho "$0 $1"\n'
    await sandbox.write_file("tool", script)
    result = await sandbox.exec(
        "chmod +x tool; ./tool a; /bin/bash -c 'echo b'; echo 'echo c' | /bin/sh"
    )
    assert result.stdout == "./tool a\nb\nc\n"


async def test_persistent_shell_keeps_variables_functions_and_its_directory() -> None:
    sandbox = virtual()
    await sandbox.exec("x=1; export Y=2; f() { echo f$x$Y; }; mkdir d; cd d; set -e")
    assert (await sandbox.exec("f; pwd; false; echo on")).stdout == "f12\n/workspace/d\non\n"
    assert sandbox.cwd == "/workspace"


async def test_fresh_shell_keeps_only_files() -> None:
    sandbox = virtual(shell="fresh")
    await sandbox.exec("x=1; cd /tmp; f() { :; }; echo kept > /workspace/kept")
    result = await sandbox.exec('echo "[$x] $PWD $(type -t f)"; cat kept')
    assert result.stdout == "[] /workspace \nkept\n"


async def test_files_can_be_used_while_a_script_runs() -> None:
    sandbox = virtual()
    running = asyncio.create_task(sandbox.exec("until [ -e go ]; do sleep 0.01; done; cat go"))
    await asyncio.sleep(0.1)
    assert await sandbox.readdir(".") == []
    await sandbox.write_file("go", "went\n")
    assert (await running).stdout == "went\n"


async def test_event_loop_runs_while_a_script_runs() -> None:
    sandbox = virtual()
    running = asyncio.create_task(sandbox.exec("for i in $(seq 50000); do :; done; echo done"))
    ticks = 0
    while not running.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert (await running).stdout == "done\n"
    assert ticks > 3


async def test_two_sandboxes_run_at_the_same_time() -> None:
    one, two = virtual(), virtual()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(one.exec("sleep 0.3; date +%s%N"))
        second = group.create_task(two.exec("date +%s%N; sleep 0.3"))
    assert int(second.result().stdout) < int(first.result().stdout)


async def test_scripts_of_one_sandbox_run_in_order() -> None:
    sandbox = virtual()
    async with asyncio.TaskGroup() as group:
        for n in range(20):
            group.create_task(sandbox.exec(f"echo {n} >> order"))
    assert (await sandbox.read_file("order")).split() == [str(n) for n in range(20)]


async def test_cancelled_call_does_not_block_the_queue() -> None:
    sandbox = virtual()
    first = asyncio.create_task(sandbox.exec("sleep 0.3; echo first"))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(sandbox.exec("touch ran"))
    third = asyncio.create_task(sandbox.exec("ls; echo third"))
    await asyncio.sleep(0.05)
    second.cancel()
    assert (await first).stdout == "first\n"
    assert (await third).stdout == "third\n"


def test_sandbox_works_on_several_event_loops_in_turn() -> None:
    sandbox = virtual()

    async def run_three() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sandbox.exec("sleep 0.01; echo $((++n))")) for _ in range(3)]
        return [task.result().stdout.strip() for task in tasks]

    assert [asyncio.run(run_three()), asyncio.run(run_three())] == [
        ["1", "2", "3"],
        ["4", "5", "6"],
    ]


def test_sandbox_works_on_two_event_loops_at_once() -> None:
    sandbox = virtual()

    async def count() -> None:
        for _ in range(20):
            await sandbox.exec("echo $((++n)) >> seen")

    users = [threading.Thread(target=lambda: asyncio.run(count())) for _ in range(2)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    seen = asyncio.run(sandbox.read_file("seen"))
    assert [int(line) for line in seen.split()] == list(range(1, 41))


async def test_closed_sandbox_raises() -> None:
    sandbox = virtual()
    await sandbox.exec("true")
    await sandbox.aclose()
    for call in (sandbox.exec("true"), sandbox.readdir("/"), sandbox.snapshot()):
        with pytest.raises(SandboxGone):
            await call


async def test_closing_stops_the_running_script() -> None:
    sandbox = virtual()
    running = asyncio.create_task(sandbox.exec("while :; do sleep 0.01; done"))
    await asyncio.sleep(0.1)
    await sandbox.aclose()
    result = await running
    assert (result.exit_code, result.timed_out) == (137, False)
    assert "closed" in result.stderr


async def test_closing_does_not_wait_for_a_stuck_command() -> None:
    release = threading.Event()
    sandbox = virtual(commands={"stuck": lambda call: str(release.wait(15))})
    running = asyncio.create_task(sandbox.exec("stuck"))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(sandbox.aclose(), 10)
    release.set()
    await running


async def test_stuck_command_is_abandoned_after_its_timeout() -> None:
    release = threading.Event()

    def stuck(call: CommandCall) -> str:
        release.wait(15)
        return ""

    sandbox = virtual(commands={"stuck": stuck}, env={"KEPT": "yes"})
    await sandbox.exec("cd /tmp; x=lost")
    result = await sandbox.exec("echo before; stuck", timeout=0.2)
    assert (result.exit_code, result.stdout) == (124, "before\n")
    assert "left behind" in result.stderr
    assert (await sandbox.exec('echo "$PWD $KEPT [$x]"')).stdout == "/tmp yes []\n"
    release.set()


def test_interpreter_exits_cleanly_while_a_script_runs() -> None:
    program = (
        "import asyncio, threading, time, smokebox\n"
        "s = smokebox.virtual()\n"
        "run = lambda: asyncio.run(s.exec('while :; do echo x; done'))\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(0.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=15)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_idle_sandboxes_hold_no_threads() -> None:
    before = threading.active_count()
    sandboxes = [virtual() for _ in range(20)]
    for sandbox in sandboxes:
        await sandbox.exec("echo hi; sleep 0.001")
    assert threading.active_count() - before <= 3
