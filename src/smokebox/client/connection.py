"""Connections to one server, kept for as long as the event loop that made them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from smokebox import __version__
from smokebox.client.answering import Unconnected
from smokebox.client.http_client import HttpClient
from smokebox.client.place import short_path
from smokebox.client.socket import open_socket
from smokebox.errors import InvalidOption
from smokebox.foundation.http1.connection import Connection

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator

    from smokebox.client.socket import Socket

_CONNECT_SECONDS = 10.0
_NEXT_ADDRESS_SECONDS = 0.25

_Pools: TypeAlias = "dict[asyncio.AbstractEventLoop, tuple[Pool, AsyncGenerator[Pool, None]]]"


class Pool:
    """Connections of one event loop: `http` sends requests, `socket` opens WebSockets."""

    def __init__(self, address: Address, path: str | None, headers: dict[str, str]) -> None:
        self._address = address
        self._path = path
        self._headers = headers
        parts = urlsplit(address.base)
        # Latin-1, as heads are written: the bytes are those of UTF-8.
        base = parts.path.encode().decode("latin-1")
        self.http = HttpClient(base, {"host": parts.netloc, **headers}, self._connect)

    def route(self) -> dict[str, Any]:
        """Return the options for an event loop, or for `websockets`, to connect to the server."""
        return self._address.tcp() if self._path is None else {"unix": True, "path": self._path}

    async def socket(self, target: str, heartbeat: float) -> Socket:
        """Open a WebSocket; see `open_socket`."""
        url = self._address.base + target
        return await open_socket(url, self.route(), self._headers, heartbeat=heartbeat)

    def close(self) -> None:
        """Close the idle connections."""
        self.http.close()

    async def _connect(self, silence: float | None) -> Connection:
        loop = asyncio.get_running_loop()
        connection = functools.partial(Connection, timeout=silence)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                if self._path is not None:
                    return (await loop.create_unix_connection(connection, self._path))[1]
                return (await loop.create_connection(connection, **self._address.tcp()))[1]
        except TimeoutError as error:
            raise Unconnected(f"nobody answered in {_CONNECT_SECONDS:g} s") from error
        except OSError as error:
            raise Unconnected(error.strerror or str(error)) from error


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `base` is what paths are appended to, `socket` its unix socket.

    `login` is the name and the password that were written before its host.
    """

    base: str
    socket: str | None = None
    login: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """`http://host:port`, `https://host`, or `unix:/path/to/a/socket`."""
        if url.startswith("unix:") and (path := url.removeprefix("unix:").removeprefix("//")):
            return cls("http://localhost", os.path.abspath(path))
        if url.startswith(("http://", "https://")) and _has_host(url):
            parts = urlsplit(url.rstrip("/"))
            login, _, host = parts.netloc.rpartition("@")
            return cls(f"{parts.scheme}://{host}{parts.path}", login=unquote(login) or None)
        raise InvalidOption(
            f"{url!r} is not the address of a server.",
            hint="Pass http://host:port, https://host, or unix:/path/to/server.sock.",
            option="url",
            value=url,
        )

    def tcp(self) -> dict[str, Any]:
        """What the running event loop needs to connect to it."""
        parts = urlsplit(self.base)
        secure = parts.scheme == "https"
        options: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or (443 if secure else 80),
            "ssl": _tls() if secure else None,
        }
        if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            # Of several addresses one may lead nowhere. uvloop tries them one by one.
            options["happy_eyeballs_delay"] = _NEXT_ADDRESS_SECONDS
        return options

    def __str__(self) -> str:
        return self.base if self.socket is None else f"unix:{self.socket}"


class Connections:
    """The connections to one server, a pool of them for each event loop."""

    def __init__(self, address: Address, key: str | None) -> None:
        self.address = address
        self._headers = {"user-agent": f"smokebox/{__version__}", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        elif address.login:
            login = base64.b64encode(address.login.encode()).decode()
            self._headers["authorization"] = f"Basic {login}"
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
        path = None
        if address.socket is not None:
            path = stack.enter_context(short_path(address.socket))
        pool = Pool(address, path, headers)
        try:
            yield pool
        finally:
            pools.pop(asyncio.get_running_loop(), None)
            pool.close()


@functools.cache
def _tls() -> ssl.SSLContext:
    """Whom to trust, read once: it takes longer than a request."""
    import ssl

    return ssl.create_default_context()


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
