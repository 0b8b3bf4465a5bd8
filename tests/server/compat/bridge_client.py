"""An HTTP client of one sandbox over the bridge protocol."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.foundation import sse

if TYPE_CHECKING:
    import aiohttp


@dataclass(slots=True)
class CommandEvents:
    """The output and the last event of a command."""

    stdout: bytes = b""
    stderr: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    last: str = ""
    data: Any = None

    def add(self, event: sse.Event) -> None:
        """Add an event."""
        if event.name in ("stdout", "stderr"):
            piece = base64.b64decode(event.data, validate=True)
            self.pieces.append(piece)
            setattr(self, event.name, getattr(self, event.name) + piece)
        else:
            self.last, self.data = event.name, json.loads(event.data)


class BridgeClient:
    """A client of one sandbox."""

    def __init__(self, http: aiohttp.ClientSession, id: str) -> None:
        self.http = http
        self.id = id

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Return a request to a path below the sandbox, as of aiohttp."""
        return self.http.request(method, f"/v1/sandbox/{self.id}{path}", **options)

    async def request_error(self, method: str, path: str, **options: Any) -> tuple[int, str, str]:
        """Send a request that fails, and return its status, code and message."""
        async with self.request(method, path, **options) as response:
            body = await response.json()
            assert set(body) == {"error", "code"}
            assert response.content_type == "application/json"
            return response.status, body["code"], body["error"]

    async def run(self, *argv: str, session: str | None = None, **body: Any) -> CommandEvents:
        """Run a command to its end."""
        headers = {} if session is None else {"Session-Id": session}
        done, reader = CommandEvents(), sse.EventReader()
        body = {"argv": argv, **body}
        async with self.request("POST", "/exec", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"] == "text/event-stream"
            async for data in response.content.iter_any():
                assert data.isascii()
                for event in reader.feed(data):
                    assert not done.last, "an event after the last one"
                    done.add(event)
        return done

    async def output(self, *argv: str, **options: Any) -> str:
        """Run a command that succeeds, and return its output."""
        done = await self.run(*argv, **options)
        assert (done.last, done.data, done.stderr) == ("exit", {"exit_code": 0}, b"")
        return done.stdout.decode()

    async def put(self, path: str, data: bytes) -> None:
        """Write a file; `path` is percent-encoded."""
        async with self.request("PUT", f"/file/{path}", data=io.BytesIO(data)) as response:
            assert (response.status, await response.json()) == (200, {"ok": True})

    async def get(self, path: str) -> bytes:
        """Read a file; `path` is percent-encoded."""
        async with self.request("GET", f"/file/{path}") as response:
            assert (response.status, response.content_type) == (200, "application/octet-stream")
            return bytes(await response.read())

    async def running(self) -> bool:
        """Return the result of /running."""
        async with self.request("GET", "/running") as response:
            assert response.status == 200
            return bool((await response.json())["running"])
