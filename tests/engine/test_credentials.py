"""Being root of a sandbox for a while: whose files are made, what opens, and what is given back."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smokebox.engine.files.credentials import acting_as, own_umask
from smokebox.engine.jail.api import Owner

FIRST = 0x50000000
OWNER = Owner(uid=FIRST, gid=FIRST, count=65536)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def status(*names: str) -> dict[str, str]:
    """Lines of what the kernel knows of this very thread."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    lines = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    return {name: lines[name] for name in names}


@as_root
def test_what_is_made_belongs_to_the_sandbox(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with acting_as(OWNER):
        (tmp_path / "made").write_text("")
    found = (tmp_path / "made").stat()
    assert (found.st_uid, found.st_gid) == (FIRST, FIRST)


@as_root
def test_a_private_directory_of_another_id_is_passable(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "file").write_text("kept")
    (private / "file").chmod(0)
    os.chown(private, FIRST + 1000, FIRST + 1000)
    with acting_as(OWNER):
        assert (private / "file").read_text() == "kept"
        os.chown(private / "file", FIRST + 7, FIRST + 7)
        os.chmod(private / "file", 0o640)


@as_root
def test_only_what_files_need_is_kept_meanwhile() -> None:
    with acting_as(OWNER):
        assert status("CapEff") == {"CapEff": f"{0b11111:016x}"}


@as_root
def test_everything_is_given_back_in_a_thread_that_never_did_it_before() -> None:
    def compare() -> tuple[object, object]:
        before = status("Uid", "Gid", "CapEff", "CapPrm")
        with acting_as(OWNER):
            assert status("Uid")["Uid"].split()[3] == str(FIRST)
        return before, status("Uid", "Gid", "CapEff", "CapPrm")

    with ThreadPoolExecutor(1) as pool:
        before, after = pool.submit(compare).result()
    assert before == after


@as_root
def test_everything_is_given_back_after_an_exception() -> None:
    before = status("Uid", "Gid", "CapEff")
    with pytest.raises(ZeroDivisionError), acting_as(OWNER):
        raise ZeroDivisionError
    assert status("Uid", "Gid", "CapEff") == before


@as_root
def test_other_threads_stay_who_they_are() -> None:
    inside, looked = threading.Event(), threading.Event()

    def act() -> None:
        with acting_as(OWNER):
            inside.set()
            looked.wait(5)

    thread = threading.Thread(target=act)
    thread.start()
    inside.wait(5)
    uids = status("Uid")["Uid"].split()
    looked.set()
    thread.join()
    assert uids == ["0", "0", "0", "0"]


def test_acting_as_oneself_changes_nothing(tmp_path: Path) -> None:
    me = Owner(uid=os.geteuid(), gid=os.getegid(), count=1)
    with acting_as(me):
        (tmp_path / "made").write_text("")
    assert (tmp_path / "made").stat().st_uid == os.geteuid()


def test_a_thread_can_have_a_mask_of_its_own(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with ThreadPoolExecutor(1, initializer=own_umask) as pool:
            pool.submit((tmp_path / "theirs").write_text, "").result()
        (tmp_path / "ours").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "theirs").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o600
