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

from asking import Answer, ask
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

async def answer(request):
    told = last_text(request)
    if told.startswith("wait"):
        while not (FOLDER / told.split()[1]).exists():
            await asyncio.sleep(0.01)
    return Turn(f"echo: {told}", pace=0.001)

agent = create_agent(model=ScriptedModel(then=answer), description="Says what it is told.")
"""
ADD = """
async def run(ctx):
    ctx.log.info("adding", count=len(ctx.payload))
    return {"sum": sum(ctx.payload)}
"""


def project(folder: Path, **files: str) -> Path:
    """Write a project: `agents__echo="..."` is agents/echo.py. It always has an echo agent."""
    files = files or {"agents__echo": ECHO, "workflows__add": ADD}
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream: its offset, its kind and its data."""

    id: int | None
    kind: str
    data: Any


@dataclass(frozen=True, slots=True)
class Site:
    """A served app, and an HTTP client that is not ours."""

    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> Answer:
        return await ask(self.http.get(self.url + path, **options))

    async def delete(self, path: str) -> Answer:
        return await ask(self.http.delete(self.url + path))

    async def post(self, path: str, body: object = None, **options: Any) -> Answer:
        if body is not None:
            options["json"] = body
        return await ask(self.http.post(self.url + path, **options))

    async def say(self, conversation: str, message: str, **options: Any) -> Answer:
        """Send a message to an agent: `say("echo/one", "hello")`."""
        return await self.post(f"/agents/{conversation}", {"message": message}, **options)

    async def outcome(self, submission_id: str) -> Any:
        """Return the outcome of a submission."""
        while True:
            found = await self.get(f"/submissions/{submission_id}?wait=20")
            if found.body["state"] == "ended":
                return found.body

    async def running(self, submission_id: str) -> None:
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
        sent = {"accept": "text/event-stream", **(headers or {})}
        if last is not None:
            sent["last-event-id"] = str(last)
        reader = EventReader()
        async with self.http.request(method, self.url + path, headers=sent, json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for data in answer.content.iter_any():
                for one in reader.feed(data):
                    id = None if one.id is None else int(one.id)
                    yield Event(id, one.name, json.loads(one.data))


@contextlib.asynccontextmanager
async def serving(app: Any, *, lifespan: str = "auto", root: str = "") -> AsyncIterator[Site]:
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
async def served(folder: Path, **options: Any) -> AsyncIterator[Site]:
    """Serve a project."""
    async with serving(create_app(folder, **options)) as site:
        yield site


def app_of(asgi: Any) -> App:
    """Return the `App` behind an ASGI app from `create_app`."""
    return asgi.state.smokebox  # type: ignore[no-any-return]
