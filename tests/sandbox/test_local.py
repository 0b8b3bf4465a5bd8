"""`local()`: options, environment, files on the host, spilled output, and closing."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import sys
from typing import TYPE_CHECKING, cast

import pytest
import pytest_asyncio

from smokebox import ExecStream, SandboxApi, local
from smokebox.errors import (
    AccessDenied,
    InvalidOption,
    InvalidPath,
    NotText,
    PathError,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SandboxGone,
    SymlinkLoop,
)
from smokebox.sandbox.local import KEPT, LocalSandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path


@pytest_asyncio.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[LocalSandbox]:
    async with local(cwd=tmp_path) as sandbox:
        yield sandbox


async def variables_of_commands(sandbox: LocalSandbox) -> set[str]:
    names = {line.partition("=")[0] for line in (await sandbox.exec("env")).stdout.splitlines()}
    return names - {"PWD", "SHLVL", "_"}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def exists(path: str | Path) -> bool:
    return os.path.lexists(path)


async def wait_until_gone(pid: int) -> None:
    for _ in range(500):
        if not is_running(pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{pid} still runs")


def test_local_sandbox_satisfies_the_contract(tmp_path: Path) -> None:
    assert isinstance(local(cwd=tmp_path), SandboxApi)


def test_default_cwd_is_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sandbox = local()
    monkeypatch.chdir("/")
    assert sandbox.cwd == str(tmp_path)


def test_relative_cwd_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local(cwd="a/../a").cwd == str(tmp_path / "a")


def test_missing_cwd_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound):
        local(cwd=tmp_path / "absent")


def test_file_as_cwd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathNotDirectory):
        local(cwd=tmp_path / "file")


@pytest.mark.parametrize("cwd", [3, b"/tmp", ["/"]])
def test_cwd_that_is_not_a_path_is_refused(cwd: object) -> None:
    with pytest.raises((InvalidOption, InvalidPath)):
        local(cwd=cast("str", cwd))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "10"])
def test_invalid_max_output_is_refused(size: object) -> None:
    with pytest.raises(InvalidOption, match="max_output"):
        local(max_output=cast("int", size))


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="'max_output'"):
        local(max_outputs=1)  # type: ignore[call-arg]


async def test_only_kept_variables_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*KEPT, "API_TOKEN", "SSH_AUTH_SOCK", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, os.environ.get(name) or str(tmp_path))
    async with local(cwd=tmp_path) as sandbox:
        assert await variables_of_commands(sandbox) == set(KEPT)


def test_kept_variables_are_exactly_these() -> None:
    assert set(KEPT) == {
        *("PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "SHELL", "LANG", "LC_ALL"),
        *("LC_CTYPE", "TZ", "TERM", "TMPDIR", "TMP", "TEMP"),
    }


async def test_environment_is_captured_at_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "before")
    async with local(cwd=tmp_path) as sandbox:
        monkeypatch.setenv("TZ", "after")
        assert (await sandbox.exec("echo $TZ")).stdout == "before\n"


async def test_env_adds_and_removes_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    async with local(cwd=tmp_path, env={"EXTRA": "a b", "TZ": None}) as sandbox:
        assert (await sandbox.exec('echo "$EXTRA:${TZ-unset}"')).stdout == "a b:unset\n"


async def test_env_of_exec_overrides(tmp_path: Path) -> None:
    async with local(cwd=tmp_path, env={"A": "1", "B": "1"}) as sandbox:
        assert (await sandbox.exec("echo $A$B", env={"B": "2"})).stdout == "12\n"
        assert (await sandbox.exec("echo $A$B")).stdout == "11\n"


INVALID_ENVS = [
    ["A=1"],
    True,
    {"A": 1},
    {1: "a"},
    {"A=B": "c"},
    {"A": "x\0y"},
    {"": "a"},
    {"1": None},
]


@pytest.mark.parametrize("env", INVALID_ENVS)
def test_invalid_env_is_refused(env: object) -> None:
    with pytest.raises(InvalidOption):
        local(env=cast("Mapping[str, str | None]", env))


@pytest.mark.parametrize("command", [b"true", ["ls"], None])
async def test_command_that_is_not_text_is_refused(sandbox: LocalSandbox, command: object) -> None:
    with pytest.raises(InvalidOption, match="command"):
        await sandbox.exec(cast("str", command))


@pytest.mark.parametrize("stdin", [3, ["a"], "\ud800"])
async def test_invalid_stdin_is_refused(sandbox: LocalSandbox, stdin: object) -> None:
    with pytest.raises(InvalidOption, match="stdin"):
        await sandbox.exec("cat", stdin=cast("str", stdin))


async def test_commands_run_in_bash(sandbox: LocalSandbox) -> None:
    assert (await sandbox.exec('a=(x y); [[ ${#a[@]} == 2 ]] && echo "$0"')).success


async def test_command_is_passed_as_one_argument(sandbox: LocalSandbox) -> None:
    command = "echo 'it''s'; exit 3 #"
    result = await sandbox.exec(command)
    assert (result.exit_code, result.stdout) == (3, "its\n")


async def test_pwd_shows_the_path_as_passed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    async with local(cwd=tmp_path / "link") as sandbox:
        assert (await sandbox.exec("pwd")).stdout == f"{tmp_path}/link\n"


async def test_timeout_is_reported_on_stderr(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; sleep 300", timeout=0.5)
    assert (result.exit_code, result.stdout) == (124, "out\n")
    assert result.stderr == "err\nsmokebox: timed out after 0.5 s\n"


async def test_streamed_timeout_is_reported_on_stderr(sandbox: LocalSandbox) -> None:
    stream = sandbox.exec_stream("echo out; sleep 300", timeout=0.5)
    chunks = [(chunk.stream, chunk.data) async for chunk in stream]
    assert chunks == [("stdout", "out\n"), ("stderr", "smokebox: timed out after 0.5 s\n")]
    assert stream.exit_code == 124


async def test_unread_stream_blocks_the_command(sandbox: LocalSandbox, tmp_path: Path) -> None:
    async with sandbox.exec_stream("head -c 20000000 /dev/zero; touch done") as stream:
        await anext(stream)
        await asyncio.sleep(0.5)
        assert os.listdir(tmp_path) == []


async def test_leaving_a_stream_kills_the_command(sandbox: LocalSandbox) -> None:
    async with sandbox.exec_stream("echo $$; sleep 300") as stream:
        pid = int((await anext(stream)).data)
    assert not is_running(pid)


async def test_cancelling_a_stream_kills_the_command(sandbox: LocalSandbox) -> None:
    stream = sandbox.exec_stream("echo $$; sleep 300")
    pid = int((await anext(stream)).data)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await anext(stream)
    assert not is_running(pid)


async def test_cancelling_twice_kills_the_command(sandbox: LocalSandbox, tmp_path: Path) -> None:
    task = asyncio.ensure_future(sandbox.exec("echo $$ > pid; trap '' TERM; sleep 300"))
    pid = int((await sandbox.exec("until [ -s pid ]; do sleep 0.01; done; cat pid")).stdout)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_gone(pid)


async def test_unread_stream_runs_nothing(sandbox: LocalSandbox, tmp_path: Path) -> None:
    stream: ExecStream = sandbox.exec_stream("touch ran")
    await stream.aclose()
    assert not exists(tmp_path / "ran")


async def test_long_output_spills_to_a_file(tmp_path: Path) -> None:
    async with local(cwd=tmp_path, max_output=1000) as sandbox:
        result = await sandbox.exec("seq 100000; echo short >&2")
        assert result.truncated
        assert result.stdout.startswith("1\n2\n")
        assert result.stdout.endswith("\n99999\n100000\n")
        assert f"the whole stream is in {result.stdout_file}" in result.stdout
        assert (await sandbox.exec(f"wc -l < {result.stdout_file}")).stdout == "100000\n"
        assert (result.stderr, result.stderr_file) == ("short\n", None)


async def test_closing_removes_spilled_output(tmp_path: Path) -> None:
    async with local(cwd=tmp_path, max_output=10) as sandbox:
        file = (await sandbox.exec("seq 1000")).stdout_file
        assert file is not None
        assert exists(file)
    assert not exists(os.path.dirname(file))


async def test_cancelled_command_leaves_no_spilled_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with local(cwd=tmp_path, max_output=10) as sandbox:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await sandbox.exec("yes")
        assert [files for _, _, files in os.walk(tmp_path)] == [[], []]


async def test_100_mb_of_output_are_spilled(tmp_path: Path) -> None:
    async with local(cwd=tmp_path, max_output=1 << 20) as sandbox:
        result = await sandbox.exec("head -c 100000000 /dev/zero | tr '\\0' x")
        assert result.stdout_file is not None
        assert (await sandbox.stat(result.stdout_file)).size == 100_000_000
        assert len(result.stdout) < (1 << 20) + 500


async def test_closing_kills_background_processes(tmp_path: Path) -> None:
    async with local(cwd=tmp_path) as sandbox:
        pid = int((await sandbox.exec("(setsid sleep 300 & echo $!)")).stdout)
        assert is_running(pid)
    assert not is_running(pid)


async def test_dropped_sandbox_kills_its_background_processes(tmp_path: Path) -> None:
    pid = int((await local(cwd=tmp_path).exec("sleep 300 & echo $!")).stdout)
    gc.collect()
    await wait_until_gone(pid)


async def test_closed_sandbox_refuses_commands(tmp_path: Path) -> None:
    sandbox = local(cwd=tmp_path)
    await sandbox.aclose()
    await sandbox.aclose()
    with pytest.raises(SandboxGone, match=r"local\(\)"):
        await sandbox.exec("true")


async def test_closing_during_a_command_is_reported(tmp_path: Path) -> None:
    sandbox = local(cwd=tmp_path)
    stream = sandbox.exec_stream("echo hi; sleep 300")
    await anext(stream)
    await sandbox.aclose()
    with pytest.raises(SandboxGone, match="closed"):
        await anext(stream)


def test_sandbox_outlives_its_event_loop(tmp_path: Path) -> None:
    sandbox = local(cwd=tmp_path)
    for word in ("one", "two"):
        assert asyncio.run(sandbox.exec(f"echo {word}")).stdout == f"{word}\n"
    asyncio.run(sandbox.aclose())


async def test_capabilities_report_no_isolation(sandbox: LocalSandbox) -> None:
    capabilities = await sandbox.capabilities()
    assert (capabilities.isolation, capabilities.network) == ("none", "open")
    assert capabilities.persistence == "host"
    assert capabilities.commands is not None
    assert {"bash", "ls", "cat"} <= capabilities.commands


async def test_capabilities_use_the_path_of_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "rg").write_text("#!/bin/sh\n")
    (tmp_path / "rg").chmod(0o755)
    async with local(cwd=tmp_path, env={"PATH": str(tmp_path)}) as sandbox:
        assert (await sandbox.capabilities()).commands == frozenset({"rg", "bash"})


async def test_replacing_a_file_keeps_its_mode(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("old")
    (tmp_path / "run.sh").chmod(0o751)
    await sandbox.write_file("run.sh", "new")
    assert stat.S_IMODE((tmp_path / "run.sh").stat().st_mode) == 0o751
    assert (tmp_path / "run.sh").read_text() == "new"


async def test_created_file_has_the_default_mode(sandbox: LocalSandbox, tmp_path: Path) -> None:
    await sandbox.write_file("fresh", "")
    (tmp_path / "usual").touch()
    assert (tmp_path / "fresh").stat().st_mode == (tmp_path / "usual").stat().st_mode


async def test_writing_goes_through_symlinks(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/target")
    await sandbox.write_file("link", "data")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "target").read_text() == "data"


async def test_writing_to_a_device_does_not_replace_it(sandbox: LocalSandbox) -> None:
    await sandbox.write_file("/dev/null", "data")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


async def test_writing_to_a_full_device_fails(sandbox: LocalSandbox) -> None:
    with pytest.raises(PathError, match="no space left"):
        await sandbox.write_file("/dev/full", "data")


async def test_failed_write_leaves_no_files(sandbox: LocalSandbox, tmp_path: Path) -> None:
    with pytest.raises(PathError):
        await sandbox.write_file(f"a/b/{'n' * 300}", "data")
    assert os.listdir(tmp_path) == []


async def test_write_below_a_file_leaves_no_files(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(PathNotDirectory):
        await sandbox.write_file("file/a/b", "data")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


async def test_readers_see_whole_files_during_writes(sandbox: LocalSandbox) -> None:
    letters = ["a" * 500_000, "b" * 500_000]
    await sandbox.write_file("f", letters[0])
    async with asyncio.TaskGroup() as group:
        for n in range(20):
            group.create_task(sandbox.write_file("f", letters[n % 2]))
        reads = [group.create_task(sandbox.read_file("f")) for _ in range(20)]
    assert {read.result() for read in reads} <= set(letters)


async def test_concurrent_writes_share_created_parents(sandbox: LocalSandbox) -> None:
    async with asyncio.TaskGroup() as group:
        for n in range(20):
            group.create_task(sandbox.write_file(f"deep/er/{n}", str(n)))
    assert len(await sandbox.readdir("deep/er")) == 20


async def test_fifo_is_neither_read_nor_written(sandbox: LocalSandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PathError, match="not a regular file"):
        await sandbox.read_bytes("fifo")
    with pytest.raises(PathError, match="not a regular file"):
        await sandbox.write_file("fifo", "data")
    assert (await sandbox.stat("fifo")).type == "other"


async def test_socket_is_not_a_file(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sandbox.cwd)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        with pytest.raises(PathError):
            await sandbox.read_bytes("sock")
    assert (await sandbox.stat("sock")).type == "other"


async def test_not_text_error_has_path_and_offset(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc\xff")
    with pytest.raises(NotText) as caught:
        await sandbox.read_file("f")
    assert caught.value.fields == {"path": f"{tmp_path}/f", "offset": 3}


@pytest.mark.parametrize("force", [False, True])
async def test_root_is_never_removed(sandbox: LocalSandbox, force: bool) -> None:
    for path in ("/", "/..", "//", "../" * 40):
        with pytest.raises(AccessDenied):
            await sandbox.rm(path, recursive=True, force=force)


async def test_removing_a_tree_does_not_follow_symlinks(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside")
    await sandbox.rm("tree", recursive=True)
    assert os.listdir(tmp_path / "outside") == ["kept"]


async def test_force_accepts_only_a_missing_path(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    await sandbox.rm("absent", force=True)
    with pytest.raises(PathIsDirectory):
        await sandbox.rm("dir", force=True)
    with pytest.raises(PathNotFound):
        await sandbox.rm("absent", recursive=True)


async def test_names_that_are_not_utf8_are_shown_escaped(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).touch()
    assert await sandbox.readdir(".") == [r"caf\xe9"]
    assert await sandbox.glob("*") == [rf"{tmp_path}/caf\xe9"]


async def test_symlink_loop_has_its_own_error(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(SymlinkLoop):
        await sandbox.read_bytes("a")
    with pytest.raises(SymlinkLoop):
        await sandbox.write_file("a", "data")
    assert not await sandbox.exists("a")


async def test_permission_errors_are_access_denied(sandbox: LocalSandbox) -> None:
    with pytest.raises(AccessDenied):
        await sandbox.write_file("/sys/smokebox/a", "data")
    with pytest.raises(AccessDenied):
        await sandbox.mkdir("/sys/smokebox")


async def test_glob_starts_at_a_relative_cwd(sandbox: LocalSandbox, tmp_path: Path) -> None:
    await sandbox.write_file("src/a.py", "")
    await sandbox.write_file("src/b/c.py", "")
    found = await sandbox.glob("**/*.py", cwd="src")
    assert found == [f"{tmp_path}/src/a.py", f"{tmp_path}/src/b/c.py"]


async def test_python_program_streams_line_by_line(sandbox: LocalSandbox) -> None:
    program = "import sys, time\nprint('first', flush=True)\ntime.sleep(300)"
    stream = sandbox.exec_stream(f'{sys.executable} -c "$CODE"', env={"CODE": program})
    assert (await anext(stream)).data == "first\n"
    await stream.aclose()
