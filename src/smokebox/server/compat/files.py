"""Files, read and written whole."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from starlette.responses import Response, StreamingResponse

from smokebox.errors import PathIsDirectory, PathNotDirectory, PathNotFound, SmokeboxError
from smokebox.server.call import Call
from smokebox.server.compat.ids import sandbox_of, session_asked
from smokebox.server.compat.messages import ok
from smokebox.server.compat.refusal import Refusal, failed
from smokebox.server.compat.workspace import WORKSPACE, contained, workspace_path

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from starlette.requests import Request

BYTES = "application/octet-stream"
MAX_UPLOAD = 32 << 20


async def read(call: Call) -> Response:
    """The bytes of a file."""
    path, sandbox = _path(call.request), sandbox_of(call.request)
    path = await contained(sandbox, path)
    source = sandbox.files.read_stream(path)
    try:
        first = await anext(source, b"")
    except (PathNotFound, PathNotDirectory) as error:
        raise Refusal(404, f"File not found: {path}", "workspace_read_not_found") from error
    except PathIsDirectory as error:
        raise Refusal(400, f"{path} is a directory") from error
    except SmokeboxError as error:
        raise failed("read", error, "exec_transport_error") from error
    return StreamingResponse(resumed(first, source), media_type=BYTES)


async def write(call: Call) -> Response:
    """Make or replace a file, and its parent directories."""
    path, sandbox = _path(call.request), sandbox_of(call.request)
    too_large = Refusal(
        413, f"payload too large: the limit is {MAX_UPLOAD} bytes", "payload_too_large"
    )
    refuse_longer(call.request, too_large)
    path = await contained(sandbox, path)
    if path == WORKSPACE:
        raise Refusal(400, f"{path} is a directory")
    try:
        await sandbox.files.write_stream(path, at_most(call.pieces(), too_large))
    except SmokeboxError as error:
        raise failed("write", error, "workspace_archive_write_error") from error
    return ok()


async def resumed(first: bytes, source: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """A source of which the first piece is taken. Closing it closes the source."""
    async with contextlib.aclosing(source):
        yield first
        async for piece in source:
            yield piece


def refuse_longer(request: Request, refusal: Refusal) -> None:
    """Raise for a body that says beforehand that it is too long."""
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > MAX_UPLOAD:
        raise refusal


async def at_most(
    pieces: AsyncGenerator[bytes, None], refusal: Refusal
) -> AsyncGenerator[bytes, None]:
    """A body as it comes, until it is too long."""
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > MAX_UPLOAD:
            raise refusal
        yield piece


def _path(request: Request) -> str:
    """The path of a file, decoded once: after that a `%` is a `%`."""
    session_asked(request)
    # The decoded path of the scope has lost what is not UTF-8.
    raw: bytes = request.scope["raw_path"]
    _, _, encoded = raw.partition(b"/file/")
    path = unquote_to_bytes(encoded).decode("utf-8", "surrogateescape")
    if not path.strip("/"):
        raise Refusal(400, "file path must not be empty")
    return workspace_path(f"/{path}")
