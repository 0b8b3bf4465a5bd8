"""Connections to one server, kept for as long as the event loop that made them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from smokebox import __version__, wire
from smokebox.client.answering import Unconnected
from smokebox.client.exchange import Exchanges
from smokebox.client.place import short_path
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    import aiohttp

# Less than what the server keeps an idle connection for: it must not end under a request.
_KEEP_ALIVE = 30.0
_CONNECT_SECONDS = 10.0

_Pools: TypeAlias = "dict[asyncio.AbstractEventLoop, tuple[Pool, AsyncGenerator[Pool, None]]]"


class Pool:
    """What the requests on one event loop are sent with: the small ones over a unix socket
    by `exchanges`, all others by `session`, which is made when it is first needed."""

    def __init__(
        self, exchanges: Exchanges | None, make: Callable[[], aiohttp.ClientSession]
    ) -> None:
        self.exchanges = exchanges
        self._make = make
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """What aiohttp sends requests with."""
        if self._session is None:
            self._session = self._make()
        return self._session

    async def aclose(self) -> None:
        """Close all of it."""
        if self.exchanges is not None:
            self.exchanges.close()
        if self._session is not None:
            await self._session.close()


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
        if url.startswith(("http://", "https://")) and _has_host(url):
            return cls(url.rstrip("/"))
        raise InvalidOption(
            f"{url!r} is not the address of a server.",
            hint="Pass http://host:port, https://host, or unix:/path/to/server.sock.",
            option="url",
            value=url,
        )

    def __str__(self) -> str:
        return self.base if self.socket is None else f"unix:{self.socket}"


class Connections:
    """The connections to one server, a pool of them for each event loop."""

    def __init__(self, address: Address, key: str | None) -> None:
        self.address = address
        self._headers = {"user-agent": f"smokebox/{__version__}", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._pools: _Pools = {}
        # Held by this, too, and so never garbage before it was closed.
        weakref.finalize(self, _close_all, self._pools).atexit = False

    @property
    def authorization(self) -> str | None:
        """What says who we are."""
        return self._headers.get("authorization")

    async def pool(self) -> Pool:
        """What requests on this event loop are sent with. Raises `Unconnected`."""
        loop = asyncio.get_running_loop()
        found = self._pools.get(loop)
        if found is None:
            # An event loop closes its open generators at its end, and the session with this
            # one: nobody has to close a client.
            opened = _open(self.address, self._headers, self._pools)
            try:
                found = self._pools[loop] = (await anext(opened), opened)
            except OSError as error:
                raise Unconnected(error.strerror) from error
        return found[0]

    async def aclose(self) -> None:
        """Close those of this event loop."""
        found = self._pools.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()


async def _open(
    address: Address, headers: dict[str, str], pools: _Pools
) -> AsyncGenerator[Pool, None]:
    with contextlib.ExitStack() as stack:
        path = exchanges = None
        if address.socket is not None:
            path = stack.enter_context(short_path(address.socket))
            exchanges = Exchanges(path, headers)
        pool = Pool(exchanges, functools.partial(_session, path, headers))
        try:
            yield pool
        finally:
            pools.pop(asyncio.get_running_loop(), None)
            await pool.aclose()


def _session(path: str | None, headers: dict[str, str]) -> aiohttp.ClientSession:
    import aiohttp

    connector: aiohttp.BaseConnector
    if path is not None:
        connector = aiohttp.UnixConnector(path, limit=0, keepalive_timeout=_KEEP_ALIVE)
    else:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=wire.SILENCE
        ),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=1 << 18,
    )


def _close_all(pools: _Pools) -> None:
    """Close what nobody uses any more, on the loops that it belongs to."""
    for loop, (_, opened) in list(pools.items()):
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_close, loop, opened)


def _close(loop: asyncio.AbstractEventLoop, opened: AsyncGenerator[Pool, None]) -> None:
    closing = loop.create_task(opened.aclose())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
