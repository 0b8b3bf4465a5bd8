"""Headless Chromium, controlled through the DevTools protocol."""

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

# Screenshots, which git ignores.
ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"
TIMEOUT = 60.0
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
    """A tab. `console` has the messages of its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.console: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def open(self) -> None:
        """Open the tab."""
        target = await self._call("Target.createTarget", url="about:blank")
        found = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for part in ("Page", "Runtime"):
            await self._call(f"{part}.enable")

    async def navigate(self, url: str) -> None:
        """Load a URL."""
        result = await self._call("Page.navigate", url=url)
        assert "errorText" not in result, (url, result)

    async def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        result = await self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_for(self, script: str, expected: object) -> None:
        """Wait until an expression has a value."""
        found: object = None
        try:
            async with asyncio.timeout(TIMEOUT):
                while (found := await self._try(script)) != expected:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(
                f"{script} is {found!r}, not {expected!r}: {self.console}"
            ) from None

    async def screenshot(self, name: str) -> None:
        """Save a screenshot in the folder of artifacts."""
        result = await self._call("Page.captureScreenshot", format="png")
        ARTIFACTS.mkdir(exist_ok=True)
        (ARTIFACTS / f"{name}.png").write_bytes(base64.b64decode(result["data"]))

    async def read_messages(self) -> None:
        """Read messages of the browser until it ends."""
        async for frame in self._socket:
            message = frame.json()
            waiter = self._waiting.pop(message.get("id", 0), None)
            if waiter is not None and not waiter.done():
                waiter.set_result(message)
            if message.get("method") == "Runtime.consoleAPICalled":
                words = [str(one.get("value", "")) for one in message["params"]["args"]]
                self.console.append(" ".join(words))

    async def _try(self, script: str) -> object:
        # While a page loads there is no document.
        with contextlib.suppress(AssertionError, RuntimeError):
            return await self.run(script)
        return None

    async def _call(self, method: str, **options: object) -> Any:
        number = next(self._numbers)
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "method": method, "params": options}
        if self._session is not None:
            request["sessionId"] = self._session
        await self._socket.send_json(request)
        async with asyncio.timeout(TIMEOUT):
            response = await waiter
        if "error" in response:
            raise RuntimeError(f"{method}: {response['error']}")
        return response["result"]


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Page]:
    """Yield a page of a browser with an empty profile; skip the test if there is no browser."""
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
                listening = asyncio.create_task(page.read_messages())
                try:
                    await page.open()
                    yield page
                finally:
                    listening.cancel()
                    await asyncio.wait([listening])
        finally:
            # Kill all processes of the browser.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address(profile: Path) -> str:
    """Wait until the browser listens, and return its WebSocket URL."""
    file = profile / "DevToolsActivePort"
    async with asyncio.timeout(TIMEOUT):
        while True:
            with contextlib.suppress(FileNotFoundError):
                lines = file.read_text().splitlines()
                if len(lines) == 2:
                    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(0.02)
