"""The state directory: location, permissions, and the lock of one process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.home import Home, open_home
from smokebox.errors import AccessDenied, Conflict, InvalidOption, PathNotDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator

HOLDER = """
import sys
from smokebox.engine.home import open_home
home = open_home(sys.argv[1])
exec(sys.argv[2])
sys.stdin.read()
"""
FORK = """
import os, time
if not (child := os.fork()):
    time.sleep(60)
print(child, flush=True)
"""
EXEC = """
import subprocess
print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
"""
FORK_AND_CLOSE = """
import os
if not (child := os.fork()):
    home.close()
    os._exit(0)
os.waitpid(child, 0)
print("closed", flush=True)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a" / "home"


@contextmanager
def holder(
    directory: Path, then: str = "print('open', flush=True)"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Open the state directory in another process, and yield it with the line that it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_state_directory_is_created_with_private_permissions(directory: Path) -> None:
    with open_home(directory) as home:
        assert home.path == str(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert Path(home.sandboxes).is_dir()
        assert home.record == f"{directory}/record.db"


def test_default_location_depends_on_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def default() -> str:
        with open_home(None) as home:
            return home.path

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SMOKEBOX_HOME", "~/configured")
    assert default() == f"{tmp_path}/configured"
    monkeypatch.setenv("SMOKEBOX_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default() == f"{tmp_path}/data/smokebox"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default() == f"{tmp_path}/.local/share/smokebox"


def test_relative_path_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_home("state") as home:
        assert home.path == f"{tmp_path}/state"


@pytest.mark.parametrize("path", ["", "a\0b", b"/tmp/x", 7, True], ids=repr)
def test_invalid_paths_are_refused(path: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        open_home(path)  # type: ignore[arg-type]
    assert caught.value.fields == {"option": "home", "value": path}


def test_second_process_gets_the_pid_of_the_owner(directory: Path) -> None:
    with holder(directory) as (process, _):
        with pytest.raises(Conflict, match=f"process {process.pid} uses") as caught:
            open_home(directory)
        assert caught.value.fields == {"kind": "home", "name": str(directory), "pid": process.pid}


def test_opening_twice_in_one_process_is_refused(directory: Path) -> None:
    with open_home(directory), pytest.raises(Conflict, match="this process already"):
        open_home(directory)


def test_close_releases_the_lock_and_may_be_repeated(directory: Path) -> None:
    first = open_home(directory)
    first.close()
    first.close()
    with open_home(directory), pytest.raises(Conflict):
        open_home(directory)


def test_lock_of_a_killed_owner_is_released(directory: Path) -> None:
    with holder(directory) as (process, _):
        process.kill()
        process.wait()
        open_home(directory).close()
        assert (directory / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("make_child", [FORK, EXEC], ids=["fork", "exec"])
def test_child_does_not_hold_the_lock_of_a_dead_parent(directory: Path, make_child: str) -> None:
    with holder(directory, make_child) as (parent, child):
        try:
            with pytest.raises(Conflict):
                open_home(directory)
            parent.kill()
            parent.wait()
            os.kill(int(child), 0)
            open_home(directory).close()
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_close_in_a_fork_keeps_the_lock_of_the_parent(directory: Path) -> None:
    with holder(directory, FORK_AND_CLOSE) as (_, line):
        assert line == "closed"
        with pytest.raises(Conflict):
            open_home(directory)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_directory_writable_by_others_is_refused_with_a_command(directory: Path, mode: int) -> None:
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(AccessDenied, match=f"{mode:04o}.*chmod go-w {directory}"):
        open_home(directory)
    directory.chmod(mode & ~0o022)
    open_home(directory).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")
def test_directory_of_another_user_is_refused_even_to_root(directory: Path) -> None:
    directory.mkdir(parents=True)
    os.chown(directory, 12345, 12345)
    with pytest.raises(AccessDenied, match=r"belongs to uid 12345.*SMOKEBOX_HOME"):
        open_home(directory)


@pytest.mark.parametrize("below", ["", "below"])
def test_file_instead_of_a_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PathNotDirectory, match="SMOKEBOX_HOME"):
        open_home(tmp_path / "file" / below)


def test_directory_that_cannot_be_created_is_refused_with_a_hint() -> None:
    with pytest.raises(OSError, match=r"cannot use the state directory .*SMOKEBOX_HOME"):
        open_home("/proc/self/smokebox")


def test_symlinked_lock_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="cannot use the state directory"):
        open_home(directory)
    assert victim.read_text() == "precious"


def test_no_descriptor_is_left_open(directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    home: Home = open_home(directory)
    for _ in range(3):
        with pytest.raises(Conflict):
            open_home(directory)
    home.close()
    assert len(os.listdir("/proc/self/fd")) <= before
