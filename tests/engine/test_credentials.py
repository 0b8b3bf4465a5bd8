"""Acting as root of a sandbox: ownership of new files, access, and the restored identity."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smokebox.engine.files.credentials import acting_as, set_thread_umask
from smokebox.engine.jail.spec import Owner

FIRST = 0x50000000
OWNER = Owner(uid=FIRST, gid=FIRST, count=65536)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")


def status(*names: str) -> dict[str, str]:
    """Return fields of /proc/<pid>/status of this thread."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    lines = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    return {name: lines[name] for name in names}


@as_root
def test_new_files_belong_to_the_sandbox(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with acting_as(OWNER):
        (tmp_path / "new").write_text("")
    found = (tmp_path / "new").stat()
    assert (found.st_uid, found.st_gid) == (FIRST, FIRST)


@as_root
def test_private_directory_of_another_id_is_accessible(tmp_path: Path) -> None:
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
def test_only_file_capabilities_are_effective() -> None:
    with acting_as(OWNER):
        assert status("CapEff") == {"CapEff": f"{0b11111:016x}"}


@as_root
def test_identity_is_restored_in_a_new_thread() -> None:
    def compare() -> tuple[object, object]:
        before = status("Uid", "Gid", "CapEff", "CapPrm")
        with acting_as(OWNER):
            assert status("Uid")["Uid"].split()[3] == str(FIRST)
        return before, status("Uid", "Gid", "CapEff", "CapPrm")

    with ThreadPoolExecutor(1) as pool:
        before, after = pool.submit(compare).result()
    assert before == after


@as_root
def test_identity_is_restored_after_an_exception() -> None:
    before = status("Uid", "Gid", "CapEff")
    with pytest.raises(ZeroDivisionError), acting_as(OWNER):
        raise ZeroDivisionError
    assert status("Uid", "Gid", "CapEff") == before


@as_root
def test_other_threads_are_not_affected() -> None:
    acting, checked = threading.Event(), threading.Event()

    def act() -> None:
        with acting_as(OWNER):
            acting.set()
            checked.wait(5)

    thread = threading.Thread(target=act)
    thread.start()
    acting.wait(5)
    uids = status("Uid")["Uid"].split()
    checked.set()
    thread.join()
    assert uids == ["0", "0", "0", "0"]


def test_acting_as_the_own_user_changes_nothing(tmp_path: Path) -> None:
    me = Owner(uid=os.geteuid(), gid=os.getegid(), count=1)
    with acting_as(me):
        (tmp_path / "new").write_text("")
    assert (tmp_path / "new").stat().st_uid == os.geteuid()


def test_thread_can_have_its_own_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with ThreadPoolExecutor(1, initializer=set_thread_umask) as pool:
            pool.submit((tmp_path / "thread").write_text, "").result()
        (tmp_path / "process").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "thread").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "process").stat().st_mode & 0o777 == 0o600
