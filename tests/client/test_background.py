"""Background server: find, start once, stop, and the error when it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox import get_sandbox
from smokebox.client import background
from smokebox.errors import ServiceUnavailable
from smokebox.foundation.endpoint import log_path, socket_path

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a state directory without a server, as the user's default."""
    home = str(tmp_path / "home")
    monkeypatch.setenv("SMOKEBOX_HOME", home)
    monkeypatch.delenv("SMOKEBOX_URL", raising=False)
    yield home
    background.stop(home)


def test_find_returns_none_without_a_server(home: str) -> None:
    assert background.find() is None
    assert background.stop() is False


def test_server_is_started_found_and_stopped(home: str) -> None:
    started = background.start(idle_exit=60)
    found = background.find()
    assert found is not None
    assert (found.pid, found.home) == (started.pid, home)
    assert (found.socket, found.log) == (socket_path(home), log_path(home))
    assert found.uptime is not None
    assert 0 <= found.uptime < 60
    assert os.stat(found.log).st_mode & 0o777 == 0o600
    assert background.stop() is True
    assert background.find() is None


def test_started_server_is_an_orphan_in_its_own_session(home: str) -> None:
    pid = background.start().pid
    assert pid is not None
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert int(status["PPid"]) != os.getpid()
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_concurrent_starts_get_one_server(home: str) -> None:
    code = "from smokebox.client import background; print(background.start().pid)"

    def start(_: int) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(start, range(4)))) == 1


async def test_start_waits_for_a_server_that_is_stopping(home: str) -> None:
    old = await asyncio.to_thread(background.start)
    await get_sandbox("box").start_process("sleep 100")
    assert old.pid is not None
    os.kill(old.pid, signal.SIGTERM)
    async with asyncio.timeout(10):
        while (found := await asyncio.to_thread(background.find)) and not found.draining:
            await asyncio.sleep(0.005)
    again = await asyncio.to_thread(background.start)
    assert again.pid != old.pid
    assert (await get_sandbox("box").exec("echo hi")).stdout == "hi\n"


async def test_get_sandbox_starts_the_server_that_it_needs(home: str) -> None:
    assert (await get_sandbox("box").exec("echo hi")).stdout == "hi\n"
    assert background.find() is not None


async def test_handle_restarts_a_server_that_has_exited(home: str) -> None:
    sandbox = get_sandbox("box")
    await sandbox.write_file("kept", "here")
    assert await asyncio.to_thread(background.stop)
    assert await sandbox.read_file("kept") == "here"


def test_failed_start_raises_the_end_of_the_log(home: str) -> None:
    # A directory is in the place of the socket.
    os.makedirs(socket_path(home))
    with pytest.raises(ServiceUnavailable, match="exited during its start") as caught:
        background.start()
    assert log_path(home) in str(caught.value)
    assert len(str(caught.value).splitlines()) > 1
    os.rmdir(socket_path(home))


def test_stale_socket_counts_as_no_server(home: str) -> None:
    pid = background.start().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while background.find() is not None:
        assert time.monotonic() < deadline
    assert os.path.exists(socket_path(home))
    again = background.start()
    assert again.pid != pid
