"""A door for git in a sandbox without a network: a socket inside, held by the engine.

What comes through it is hostile. It leads to one repository, and only to reading that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from typing import TYPE_CHECKING

from aiohttp import web

from smokebox.engine.git.upstream import PACK, REFS
from smokebox.engine.jail import errands
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Iterator, Mapping

    import aiohttp

    from smokebox.engine.git.upstream import Upstream
    from smokebox.engine.jail.api import Jail

_ADDRESS = "127.0.0.1"
_MOST_CONNECTIONS = 8
_REQUEST_HEADERS = (
    "Accept",
    "Accept-Encoding",
    "Content-Encoding",
    "Content-Length",
    "Content-Type",
    "Git-Protocol",
    "User-Agent",
)
_ANSWER_HEADERS = ("Content-Encoding", "Content-Length", "Content-Type")
_CLOSE_SECONDS = 0.1
_RETRY_SECONDS = 0.1

# Whoever is inside could fill a log with broken requests.
_silence = logging.getLogger("smokebox.git.door")
_silence.propagate = False
_silence.addHandler(logging.NullHandler())


class Door:
    """Answers git's requests for one repository, of those who know the token.

    `failure` is why the first request failed that did.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.failure: SmokeboxError | None = None
        self.url = ""
        self._upstream = upstream
        self._token = secrets.token_urlsafe(24)
        self._answering: set[asyncio.Task[object]] = set()

    @contextlib.asynccontextmanager
    async def open(self, jail: Jail) -> AsyncIterator[None]:
        """Stand at `url` in the network of a jail, for as long as the block takes."""
        server = web.Server(
            self._answer,
            access_log=None,
            logger=_silence,
            # What is compressed is passed on as it is.
            auto_decompress=False,
            lingering_time=0.0,
        )
        with await errands.open_socket(jail) as listener:
            listener.bind((_ADDRESS, 0))
            listener.listen()
            self.url = f"http://{_ADDRESS}:{listener.getsockname()[1]}/{self._token}"
            listening = asyncio.ensure_future(_let_in(listener, server))
            try:
                yield
            finally:
                listening.cancel()
                for task in self._answering:
                    task.cancel()
                # In a task of its own: it gives up halfway in one that is being cancelled.
                closing = asyncio.ensure_future(server.shutdown(_CLOSE_SECONDS))
                await asyncio.wait({listening, closing, *self._answering})

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        tail = self._tail(request)
        if tail is None:
            return web.Response(status=404)
        headers = _kept(request.headers, _REQUEST_HEADERS)
        body = request.content.iter_any() if tail == PACK else None
        response = web.StreamResponse()
        try:
            async with self._upstream.ask(request.method, tail, headers, body) as answer:
                response.headers.update(_kept(answer.headers, _ANSWER_HEADERS))
                await _pass_on(answer, request, response)
        except _GitLeft:
            pass
        except SmokeboxError as error:
            self.failure = self.failure or error
            if not response.prepared:
                return web.Response(status=502)
            # Half an answer must not look like a whole one.
            if request.transport is not None:
                request.transport.abort()
        return response

    def _tail(self, request: web.BaseRequest) -> str | None:
        asked = f"{request.method} {request.raw_path}".encode()
        for method, tail in (("GET", REFS), ("POST", PACK)):
            if hmac.compare_digest(asked, f"{method} /{self._token}{tail}".encode()):
                return tail
        return None


class _GitLeft(Exception):
    """Git has closed the connection, for a reason of its own."""


async def _let_in(listener: socket.socket, server: web.Server) -> None:
    """Take connections, a few at a time: each is a descriptor of the engine's."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError:
            # Such as no descriptor to be had at the moment.
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        if len(server.connections) >= _MOST_CONNECTIONS:
            connection.close()
            # Whoever knocks without end shall not have the loop to himself.
            await asyncio.sleep(0)
            continue
        await loop.connect_accepted_socket(server, connection)


async def _pass_on(
    answer: aiohttp.ClientResponse, request: web.BaseRequest, response: web.StreamResponse
) -> None:
    with _leaving():
        await response.prepare(request)
    # Piece by piece, and no faster than git takes them.
    async for data in answer.content.iter_any():
        with _leaving():
            await response.write(data)
    with _leaving():
        await response.write_eof()


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _GitLeft from error


def _kept(headers: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}
