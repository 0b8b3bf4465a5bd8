"""The proxy that git reaches its remote by from a sandbox without a network.

Programs in the sandbox are hostile. The proxy leads to one repository, and only to reading it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING

from smokebox.engine.git.remote import PACK, REFS, RequestAborted
from smokebox.engine.jail import guest_requests
from smokebox.errors import SmokeboxError
from smokebox.foundation.http1.body import BodyReader, BodyWriter
from smokebox.foundation.http1.connection import Connection, ConnectionLost
from smokebox.foundation.http1.head import (
    Fields,
    MalformedMessage,
    RequestHead,
    parse_request,
    write_response,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from smokebox.engine.git.remote import GitRemote
    from smokebox.engine.jail.jail import Jail
    from smokebox.foundation.http1.client import ClientResponse

_ADDRESS = "127.0.0.1"
_MAX_CONNECTIONS = 8
_REQUEST_HEADERS = frozenset(
    ("accept", "accept-encoding", "content-encoding", "content-type", "git-protocol", "user-agent")
)
_RESPONSE_HEADERS = frozenset(("content-encoding", "content-type"))
_RETRY_SECONDS = 0.1
_DISCARD_SECONDS = 1.0
_MAX_DISCARDED = 1 << 20


class GitProxy:
    """Forwards git's requests for one repository if they have the token in their path.

    `failure` is the error of the first request that failed.
    """

    def __init__(self, remote: GitRemote) -> None:
        self.failure: SmokeboxError | None = None
        self.url = ""
        self._remote = remote
        self._token = secrets.token_urlsafe(24)
        self._serving: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self, jail: Jail) -> AsyncIterator[None]:
        """Listen at `url` in the network of a jail until the block ends."""
        with await guest_requests.open_socket(jail) as listener:
            listener.bind((_ADDRESS, 0))
            listener.listen()
            self.url = f"http://{_ADDRESS}:{listener.getsockname()[1]}/{self._token}"
            accepting = asyncio.create_task(self._accept(listener))
            try:
                yield
            finally:
                accepting.cancel()
                await asyncio.wait({accepting})
                for task in self._serving:
                    task.cancel()
                if self._serving:
                    await asyncio.wait(self._serving)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept a few connections at a time: each is a file descriptor of the engine."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                # For example, there is no free descriptor at the moment.
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if len(self._serving) >= _MAX_CONNECTIONS:
                sock.close()
                # A program that connects without end must not block the event loop.
                await asyncio.sleep(0)
                continue
            task = asyncio.create_task(self._serve(sock))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends."""
        task = asyncio.current_task()
        assert task is not None
        # No timeout: git may take its time to store what it got, and the clone has a deadline.
        connection = Connection(timeout=None, on_lost=task.cancel)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
            while await self._serve_request(connection):
                pass
        except (OSError, RequestAborted):
            connection.abort()
        except asyncio.CancelledError:
            connection.abort()
            if not connection.lost or task.uncancel() > 0:
                raise
        except BaseException:
            connection.abort()
            raise
        else:
            connection.close()

    async def _serve_request(self, connection: Connection) -> bool:
        """Serve one request, if there is one; return whether there can be another."""
        try:
            raw = await connection.read_head()
            if raw is None:
                return False
            head = parse_request(raw)
        except MalformedMessage as error:
            return await _refuse(connection, error.status)
        body = BodyReader(connection, head.framing, expects_continue=head.expects_continue)
        path = self._path(head)
        if path is None:
            await body.discard(limit=_MAX_DISCARDED, seconds=_DISCARD_SECONDS)
            return await _refuse(connection, 404, keep_alive=head.keep_alive and body.done)
        fields = [field for field in head.fields if field[0].lower() in _REQUEST_HEADERS]
        writer: BodyWriter | None = None
        try:
            sent = body if path == PACK else None
            async with self._remote.request(head.method, path, fields, sent) as response:
                writer = _start(connection, response, head)
                while not response.done:
                    # Piece by piece, and no faster than git takes them.
                    await _write(writer, await response.read())
        except SmokeboxError as error:
            self.failure = self.failure or error
            if writer is None:
                return await _refuse(connection, 502)
            # Half a response must not look like a whole one.
            connection.abort()
            return False
        await writer.finish()
        return head.keep_alive and head.http11 and body.done

    def _path(self, head: RequestHead) -> str | None:
        """Return the path below the repository that a request is for, if it is allowed."""
        line = f"{head.method} {head.target}".encode("latin-1")
        for method, path in (("GET", REFS), ("POST", PACK)):
            if hmac.compare_digest(line, f"{method} /{self._token}{path}".encode()):
                return path
        return None


def _start(connection: Connection, response: ClientResponse, head: RequestHead) -> BodyWriter:
    fields = [field for field in response.fields if field[0].lower() in _RESPONSE_HEADERS]
    chunked = response.length is None and head.http11
    if chunked:
        fields.append(("transfer-encoding", "chunked"))
    elif response.length is not None:
        fields.append(("content-length", str(response.length)))
    if not (head.keep_alive and head.http11):
        fields.append(("connection", "close"))
    start = write_response(response.status, response.reason, fields)
    return BodyWriter(connection, start, chunked=chunked)


async def _write(writer: BodyWriter, piece: bytes) -> None:
    try:
        await writer.write(piece)
    except ConnectionLost as error:
        raise RequestAborted from error


async def _refuse(connection: Connection, status: int, *, keep_alive: bool = False) -> bool:
    fields: Fields = [("content-length", "0")]
    if not keep_alive:
        fields.append(("connection", "close"))
    with contextlib.suppress(ConnectionLost):
        connection.write(write_response(status, HTTPStatus(status).phrase, fields))
    return keep_alive
