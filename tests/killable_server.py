"""Server in a separate process that can be killed at any line, and its state directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from engine.leftovers import sandbox_pids
from short_directory import short_directory
from smokebox.foundation.endpoint import socket_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

SOURCE = Path(__file__).parents[1] / "src"
# With `kill_at`, the process kills itself at that executed line of the traced files, counted from
# the first call of the function `since`.
PROGRAM = """
import asyncio, os, sys, threading
from smokebox.server.server import serve
from smokebox.server.settings import ServerSettings

home, kill_at, since, TRACED = sys.argv[1], int(sys.argv[2]), sys.argv[3], tuple(sys.argv[4:])
lines = -1

def trace(frame, event, argument):
    global lines
    if frame.f_code.co_filename.endswith(TRACED):
        if frame.f_code.co_name == since:
            lines = max(lines, 0)
        return step if lines >= 0 else None

def step(frame, event, argument):
    global lines
    lines += event == "line"
    if lines >= kill_at:
        os.kill(os.getpid(), 9)
    return step

if kill_at:
    sys.settrace(trace)
    threading.settrace(trace)
asyncio.run(serve(ServerSettings(home=home, pool=0, backups=os.environ.get("BACKUPS"))))
"""


# Files that create sandboxes and processes.
CREATION = (
    "server/idempotency.py",
    "routes/processes.py",
    "routes/sandboxes.py",
    "engine/processes/processes.py",
    "engine/startup.py",
)


@contextlib.contextmanager
def new_home() -> Iterator[str]:
    """Yield a state directory; at the end kill its processes and remove it."""
    base = short_directory("server")
    try:
        yield f"{base}/home"
    finally:
        for pid in list(sandbox_pids(f"{base}/home")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)


@contextlib.asynccontextmanager
async def run_killable_server(
    home: str,
    *,
    kill_at: int = 0,
    since: str = "once",
    traced: tuple[str, ...] = CREATION,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[aiohttp.ClientSession]:
    """Run a server in another process and yield an HTTP client; SIGKILL it at the end.

    With `kill_at` it kills itself at that executed line of the files `traced`, counted from the
    first call of the function `since`. `BACKUPS` in `env` is the bucket of its backups.
    """
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, home, str(kill_at), since, *traced],
        stdout=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), **(env or {})},
    )
    connector = aiohttp.UnixConnector(socket_path(home))
    try:
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            await _wait_until_ready(http, child)
            yield http
    finally:
        child.kill()
        child.wait()


async def _wait_until_ready(http: aiohttp.ClientSession, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 40
    while child.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get("/api/sandboxes") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the server does not respond; exit code {child.poll()}")
