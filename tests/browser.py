"""A real browser without a window, told what to do by its own protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Git does not keep it: what a test saw, for whoever wants to look.
ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"
PATIENCE = 60.0
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--window-size=900,600",
]


class Page:
    """One tab. `console` is what its scripts said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.console: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def begin(self) -> None:
        """Open the tab."""
        target = await self._call("Target.createTarget", url="about:blank")
        found = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for part in ("Page", "Runtime"):
            await self._call(f"{part}.enable")

    async def go(self, url: str) -> None:
        """Type an address."""
        answer = await self._call("Page.navigate", url=url)
        assert "errorText" not in answer, (url, answer)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def sees(self, script: str, wanted: object) -> None:
        """Return once an expression has that value."""
        found: object = None
        try:
            async with asyncio.timeout(PATIENCE):
                while (found := await self._look(script)) != wanted:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{script} is {found!r}, not {wanted!r}: {self.console}") from None

    async def keep(self, name: str) -> Path:
        """Keep a picture of it among the artifacts."""
        answer = await self._call("Page.captureScreenshot", format="png")
        ARTIFACTS.mkdir(exist_ok=True)
        place = ARTIFACTS / f"{name}.png"
        place.write_bytes(base64.b64decode(answer["data"]))
        return place

    async def listen(self) -> None:
        """Hear what the browser says, until it ends."""
        async for message in self._socket:
            told = message.json()
            waiter = self._waiting.pop(told.get("id", 0), None)
            if waiter is not None and not waiter.done():
                waiter.set_result(told)
            if told.get("method") == "Runtime.consoleAPICalled":
                words = [str(one.get("value", "")) for one in told["params"]["args"]]
                self.console.append(" ".join(words))

    async def _look(self, script: str) -> object:
        # Between two pages there is nothing to look at.
        with contextlib.suppress(AssertionError, RuntimeError):
            return await self.run(script)
        return None

    async def _call(self, method: str, **options: object) -> Any:
        number = next(self._numbers)
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        asked = {"id": number, "method": method, "params": options}
        if self._session is not None:
            asked["sessionId"] = self._session
        await self._socket.send_json(asked)
        async with asyncio.timeout(PATIENCE):
            answer = await waiter
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A page of a browser that knows nothing. Skips the test where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium here: apt-get install -y chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(await _address(Path(profile)), max_msg_size=0) as socket,
            ):
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    await page.begin()
                    yield page
                finally:
                    listening.cancel()
                    await asyncio.wait([listening])
        finally:
            # Its many processes are one group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address(profile: Path) -> str:
    """Where the browser listens, once it does."""
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(FileNotFoundError):
                lines = file.read_text().splitlines()
                if len(lines) == 2:
                    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(0.02)
