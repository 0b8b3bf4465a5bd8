"""A server in a process of its own, to be killed, and its state directory, to be served again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from engine.traces import processes
from smokebox.wire.place import socket_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SOURCE = Path(__file__).parents[1] / "src"
PROGRAM = """
import asyncio, sys
from smokebox.server.serving import serve
from smokebox.server.settings import Settings
asyncio.run(serve(Settings(home=sys.argv[1], pool=0)))
"""


@contextlib.contextmanager
def new_home() -> Iterator[str]:
    """A fresh state directory, gone at the end with all that runs of it."""
    base = tempfile.mkdtemp(prefix="smokebox-server-")
    try:
        yield f"{base}/home"
    finally:
        for pid in list(processes(f"{base}/home")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)


@contextlib.asynccontextmanager
async def killable(home: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A server in another process, by plain HTTP. It is killed by SIGKILL at the end."""
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, home],
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
    deadline = time.monotonic() + 15
    while child.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get("/api/sandboxes") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the server does not answer, exit code {child.poll()}")
