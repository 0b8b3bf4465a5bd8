"""The state directory: found, made, checked, and held by one process at a time."""

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
def place(tmp_path: Path) -> Path:
    return tmp_path / "a" / "home"


@contextmanager
def holder(
    place: Path, then: str = "print('open', flush=True)"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that has the home, and the line that it printed `then`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place), then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_it_is_made_with_its_parents_for_its_owner_only(place: Path) -> None:
    with open_home(place) as home:
        assert home.path == str(place)
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert Path(home.boxes).is_dir()
        assert home.box("k1") == f"{place}/boxes/k1"
        assert home.record == f"{place}/record.db"


def test_its_place_is_told_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def default() -> str:
        with open_home(None) as home:
            return home.path

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SMOKEBOX_HOME", "~/told")
    assert default() == f"{tmp_path}/told"
    monkeypatch.setenv("SMOKEBOX_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default() == f"{tmp_path}/data/smokebox"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default() == f"{tmp_path}/.local/share/smokebox"


def test_a_relative_path_is_of_the_directory_where_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_home("state") as home:
        assert home.path == f"{tmp_path}/state"


@pytest.mark.parametrize("path", ["", "a\0b", b"/tmp/x", 7, True], ids=repr)
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        open_home(path)  # type: ignore[arg-type]
    assert caught.value.fields == {"option": "home", "value": path}


def test_a_second_opener_is_told_who_has_it(place: Path) -> None:
    with holder(place) as (process, _):
        with pytest.raises(Conflict, match=f"process {process.pid} has") as caught:
            open_home(place)
        assert caught.value.fields == {"kind": "home", "name": str(place), "pid": process.pid}


def test_a_second_opener_in_the_same_process_is_told_so(place: Path) -> None:
    with open_home(place), pytest.raises(Conflict, match="this process already"):
        open_home(place)


def test_closing_lets_another_have_it_and_can_be_repeated(place: Path) -> None:
    first = open_home(place)
    first.close()
    first.close()
    with open_home(place), pytest.raises(Conflict):
        open_home(place)


def test_a_killed_owner_has_it_no_longer(place: Path) -> None:
    with holder(place) as (process, _):
        process.kill()
        process.wait()
        open_home(place).close()
        assert (place / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("make_child", [FORK, EXEC], ids=["fork", "exec"])
def test_a_child_does_not_hold_it_for_a_dead_parent(place: Path, make_child: str) -> None:
    with holder(place, make_child) as (parent, child):
        try:
            with pytest.raises(Conflict):
                open_home(place)
            parent.kill()
            parent.wait()
            os.kill(int(child), 0)
            open_home(place).close()
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_fork_that_closes_it_leaves_it_to_its_parent(place: Path) -> None:
    with holder(place, FORK_AND_CLOSE) as (_, line):
        assert line == "closed"
        with pytest.raises(Conflict):
            open_home(place)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_one_where_others_may_write_is_refused_with_the_command_that_mends_it(
    place: Path, mode: int
) -> None:
    place.mkdir(parents=True)
    place.chmod(mode)
    with pytest.raises(AccessDenied, match=f"{mode:04o}.*chmod go-w {place}"):
        open_home(place)
    place.chmod(mode & ~0o022)
    open_home(place).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_one_of_somebody_else_is_refused_even_to_root(place: Path) -> None:
    place.mkdir(parents=True)
    os.chown(place, 12345, 12345)
    with pytest.raises(AccessDenied, match=r"belongs to uid 12345.*SMOKEBOX_HOME"):
        open_home(place)


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_its_place_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PathNotDirectory, match="SMOKEBOX_HOME"):
        open_home(tmp_path / "file" / below)


def test_one_that_cannot_be_made_is_refused_with_the_next_step() -> None:
    with pytest.raises(OSError, match=r"cannot use the state directory .*SMOKEBOX_HOME"):
        open_home("/proc/self/smokebox")


def test_a_link_in_place_of_the_lock_is_not_followed(place: Path, tmp_path: Path) -> None:
    place.mkdir(parents=True, mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (place / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="cannot use the state directory"):
        open_home(place)
    assert victim.read_text() == "precious"


def test_no_descriptor_is_left_open(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    home: Home = open_home(place)
    for _ in range(3):
        with pytest.raises(Conflict):
            open_home(place)
    home.close()
    assert len(os.listdir("/proc/self/fd")) == before
