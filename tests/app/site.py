"""A project in a temporary folder, served by uvicorn on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import uvicorn

from http_response import HttpResponse, fetch
from smokebox.app import create_app
from smokebox.foundation.sse import EventReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from smokebox.app.app import App

# The agent echoes its message; for `wait NAME` it first waits until a file exists.
ECHO = """
import asyncio
from pathlib import Path
from smokebox import create_agent
from smokebox.testing import ScriptedModel, Turn, last_text

FOLDER = Path(__file__).parents[1]

async def echo(request):
    text = last_text(request)
    if text.startswith("wait"):
        while not (FOLDER / text.split()[1]).exists():
            await asyncio.sleep(0.01)
    return Turn(f"echo: {text}", pace=0.001)

agent = create_agent(model=ScriptedModel(then=echo), description="Repeats messages.")
"""
ADD = """
async def run(ctx):
    ctx.log.info("adding", count=len(ctx.payload))
    return {"sum": sum(ctx.payload)}
"""


def project(folder: Path, **files: str) -> Path:
    """Write a project: `agents__echo="..."` is agents/echo.py.

    By default it has an agent and a workflow.
    """
    files = files or {"agents__echo": ECHO, "workflows__add": ADD}
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream."""

    id: int | None
    kind: str
    data: Any


@dataclass(frozen=True, slots=True)
class Site:
    """A served app and an HTTP client."""

    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> HttpResponse:
        return await fetch(self.http.get(self.url + path, **options))

    async def delete(self, path: str, **options: Any) -> HttpResponse:
        return await fetch(self.http.delete(self.url + path, **options))

    async def post(self, path: str, body: object = None, **options: Any) -> HttpResponse:
        if body is not None:
            options["json"] = body
        return await fetch(self.http.post(self.url + path, **options))

    async def send(self, conversation: str, message: str, **options: Any) -> HttpResponse:
        """Send a message to an agent: `send("echo/one", "hello")`."""
        return await self.post(f"/agents/{conversation}", {"message": message}, **options)

    async def outcome(self, submission_id: str) -> Any:
        """Return the outcome of a submission."""
        while True:
            found = await self.get(f"/submissions/{submission_id}?wait=20")
            if found.body["state"] == "ended":
                return found.body

    async def wait_until_running(self, submission_id: str) -> None:
        """Wait until the submission is running."""
        while (await self.get(f"/submissions/{submission_id}")).body["state"] == "waiting":
            await asyncio.sleep(0.01)

    async def events(
        self,
        path: str,
        *,
        method: str = "GET",
        last: int | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Event]:
        """Yield events until the server ends the stream or the caller stops."""
        sent_headers = {"accept": "text/event-stream", **(headers or {})}
        if last is not None:
            sent_headers["last-event-id"] = str(last)
        reader = EventReader()
        async with self.http.request(
            method, self.url + path, headers=sent_headers, json=body
        ) as response:
            assert response.status == 200, await response.text()
            async for data in response.content.iter_any():
                for one in reader.feed(data):
                    id = None if one.id is None else int(one.id)
                    yield Event(id, one.name, json.loads(one.data))


@contextlib.asynccontextmanager
async def serve_asgi(app: Any, *, lifespan: str = "auto", root: str = "") -> AsyncIterator[Site]:
    """Serve an ASGI app on the test's event loop."""
    listener = socket.create_server(("127.0.0.1", 0))
    # Use the test's logging, not a handler that outlives the test.
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan=cast("Any", lifespan),
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        assert not task.done(), task
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{root}"
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            yield Site(url, http)
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def serve(folder: Path, **options: Any) -> AsyncIterator[Site]:
    """Serve a project."""
    async with serve_asgi(create_app(folder, **options)) as site:
        yield site


def app_of(asgi: Any) -> App:
    """Return the `App` behind an ASGI app from `create_app`."""
    return asgi.state.smokebox  # type: ignore[no-any-return]
