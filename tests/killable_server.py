"""A server in a process of its own, to be killed, and its state directory, to be served again."""

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

from engine.traces import processes
from places import short_directory
from smokebox.foundation.endpoint import socket_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SOURCE = Path(__file__).parents[1] / "src"
# With a number it kills itself before that line of the files it is told, counted from the first
# call of a function in them.
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
asyncio.run(serve(ServerSettings(home=home, pool=0)))
"""


MAKING = (
    "server/idempotency.py",
    "routes/processes.py",
    "routes/sandboxes.py",
    "engine/processes/processes.py",
    "engine/startup.py",
)


@contextlib.contextmanager
def new_home() -> Iterator[str]:
    """A fresh state directory, gone at the end with all that runs of it."""
    base = short_directory("server")
    try:
        yield f"{base}/home"
    finally:
        for pid in list(processes(f"{base}/home")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)


@contextlib.asynccontextmanager
async def killable(
    home: str, *, kill_at: int = 0, since: str = "once", traced: tuple[str, ...] = MAKING
) -> AsyncIterator[aiohttp.ClientSession]:
    """A server in another process, by plain HTTP. It is killed by SIGKILL at the end.

    With `kill_at` it kills itself before that line of the files `traced`, counted `since` a
    function of that name was called.
    """
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, home, str(kill_at), since, *traced],
        stdout=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)},
    )
    connector = aiohttp.UnixConnector(socket_path(home))
    try:
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            await _answers(http, child)
            yield http
    finally:
        child.kill()
        child.wait()


async def _answers(http: aiohttp.ClientSession, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 40
    while child.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get("/api/sandboxes") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the server does not answer, exit code {child.poll()}")
