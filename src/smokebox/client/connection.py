"""Connections to one server, kept for as long as the event loop that made them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import aiohttp

from smokebox.errors import InvalidOption
from smokebox.wire import SILENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

# Less than what the server keeps an idle connection for: it must not end under a request.
_KEEP_ALIVE = 30.0
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `base` is what paths are appended to, `socket` its unix socket."""

    base: str
    socket: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """`http://host:port`, `https://host`, or `unix:/path/to/a/socket`."""
        if url.startswith("unix:") and (path := url.removeprefix("unix:").removeprefix("//")):
            return cls("http://localhost", os.path.abspath(path))
        if url.startswith(("http://", "https://")):
            return cls(url.rstrip("/"))
        raise InvalidOption(
            f"{url!r} is not the address of a server.",
            hint="Pass http://host:port, https://host, or unix:/path/to/server.sock.",
            option="url",
            value=url,
        )


class Connections:
    """The connections to one server, a pool of them for each event loop."""

    def __init__(self, address: Address, key: str | None) -> None:
        self.address = address
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._sessions: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[None, None]]
        ] = WeakKeyDictionary()

    async def session(self) -> aiohttp.ClientSession:
        """What requests on this event loop are sent with."""
        loop = asyncio.get_running_loop()
        found = self._sessions.get(loop)
        if found is None or found[0].closed:
            session = self._open()
            # An event loop closes its open generators at its end, and the session with this
            # one: nobody has to close a client.
            closing = _closes(session)
            await anext(closing)
            found = self._sessions[loop] = (session, closing)
        return found[0]

    async def aclose(self) -> None:
        """Close those of this event loop."""
        found = self._sessions.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()

    def _open(self) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if self.address.socket is not None:
            connector = aiohttp.UnixConnector(
                self.address.socket, limit=0, keepalive_timeout=_KEEP_ALIVE
            )
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=SILENCE
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 18,
        )


async def _closes(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await session.close()
