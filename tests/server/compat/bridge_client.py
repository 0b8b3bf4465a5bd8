"""A sandbox behind the bridge protocol, asked by plain HTTP."""

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
class Done:
    """What the events of a command said."""

    stdout: bytes = b""
    stderr: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    last: str = ""
    data: Any = None

    def add(self, event: sse.Event) -> None:
        """Take one event."""
        if event.name in ("stdout", "stderr"):
            piece = base64.b64decode(event.data, validate=True)
            self.pieces.append(piece)
            setattr(self, event.name, getattr(self, event.name) + piece)
        else:
            self.last, self.data = event.name, json.loads(event.data)


class Bridge:
    """One sandbox behind the protocol, by plain HTTP."""

    def __init__(self, http: aiohttp.ClientSession, id: str) -> None:
        self.http = http
        self.id = id

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """A request about the sandbox."""
        return self.http.request(method, f"/v1/sandbox/{self.id}{path}", **options)

    async def refused(self, method: str, path: str, **options: Any) -> tuple[int, str, str]:
        """The status, the code and the text of a request that is refused."""
        async with self.ask(method, path, **options) as answer:
            body = await answer.json()
            assert set(body) == {"error", "code"}
            assert answer.content_type == "application/json"
            return answer.status, body["code"], body["error"]

    async def run(self, *argv: str, session: str | None = None, **body: Any) -> Done:
        """Run a command to its end."""
        headers = {} if session is None else {"Session-Id": session}
        done, reader = Done(), sse.EventReader()
        body = {"argv": argv, **body}
        async with self.ask("POST", "/exec", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["content-type"] == "text/event-stream"
            async for data in answer.content.iter_any():
                assert data.isascii()
                for event in reader.feed(data):
                    assert not done.last, "nothing comes after the last event"
                    done.add(event)
        return done

    async def out(self, *argv: str, **options: Any) -> str:
        """What a command that succeeds writes."""
        done = await self.run(*argv, **options)
        assert (done.last, done.data, done.stderr) == ("exit", {"exit_code": 0}, b"")
        return done.stdout.decode()

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, by a path that is encoded already."""
        async with self.ask("PUT", f"/file/{path}", data=io.BytesIO(data)) as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})

    async def get(self, path: str) -> bytes:
        """Read a file, by a path that is encoded already."""
        async with self.ask("GET", f"/file/{path}") as answer:
            assert (answer.status, answer.content_type) == (200, "application/octet-stream")
            return bytes(await answer.read())

    async def running(self) -> bool:
        """What /running says."""
        async with self.ask("GET", "/running") as answer:
            assert answer.status == 200
            return bool((await answer.json())["running"])
