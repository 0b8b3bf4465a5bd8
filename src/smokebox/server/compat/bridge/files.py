"""Files, and the workspace as a tar archive."""

from __future__ import annotations

import contextlib
import glob
import tarfile
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.responses import Response, StreamingResponse

from smokebox.engine.files.tar_format import TarSource, next_member, padded
from smokebox.errors import PathIsDirectory, PathNotDirectory, PathNotFound, SmokeboxError
from smokebox.server.compat.bridge.errors import BridgeError, operation_failed
from smokebox.server.compat.bridge.names import (
    WORKSPACE,
    requested_session,
    resolve_contained,
    sandbox_of,
    workspace_path,
)
from smokebox.server.compat.bridge.route import Ok, bridge_route
from smokebox.server.endpoint import BYTES, ApiCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Generator

    from starlette.requests import Request

MAX_UPLOAD = 32 << 20
_FILE = "/v1/sandbox/{id}/file/{path:path}"


@bridge_route(
    "GET",
    _FILE,
    "readFile",
    returns=BYTES,
    errors=(400, 403, 404, 502),
    session=True,
)
async def read(call: ApiCall) -> Response:
    """Read a file."""
    path, sandbox = _path(call.request), sandbox_of(call.request)
    path = await resolve_contained(sandbox, path)
    source = sandbox.files.read_stream(path)
    try:
        first = await anext(source, b"")
    except (PathNotFound, PathNotDirectory) as error:
        raise BridgeError(404, f"File not found: {path}", "workspace_read_not_found") from error
    except PathIsDirectory as error:
        raise BridgeError(400, f"{path} is a directory") from error
    except SmokeboxError as error:
        raise operation_failed("read", error, "exec_transport_error") from error
    return StreamingResponse(resume(first, source), media_type=BYTES)


@bridge_route(
    "PUT",
    _FILE,
    "writeFile",
    accepts=BYTES,
    errors=(400, 403, 413, 502),
    session=True,
)
async def write(call: ApiCall) -> Ok:
    """Write a file of at most 32 MiB, and create its parent directories."""
    path, sandbox = _path(call.request), sandbox_of(call.request)
    too_large = BridgeError(
        413, f"payload too large: the limit is {MAX_UPLOAD} bytes", "payload_too_large"
    )
    check_length(call.request, too_large)
    path = await resolve_contained(sandbox, path)
    if path == WORKSPACE:
        raise BridgeError(400, f"{path} is a directory")
    try:
        await sandbox.files.write_stream(path, limit_size(call.chunks(), too_large))
    except SmokeboxError as error:
        raise operation_failed("write", error, "workspace_archive_write_error") from error
    return Ok()


async def resume(first: bytes, source: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Yield the first piece, then the rest of its source. Closing it closes the source."""
    async with contextlib.aclosing(source):
        yield first
        async for piece in source:
            yield piece


def check_length(request: Request, refusal: BridgeError) -> None:
    """Raise if the Content-Length of a body is over the limit."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_UPLOAD:
        raise refusal


async def limit_size(
    pieces: AsyncGenerator[bytes, None], refusal: BridgeError
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body, and raise when it is over the limit."""
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > MAX_UPLOAD:
            raise refusal
        yield piece


def _path(request: Request) -> str:
    """Return the path of a file, percent-decoded once."""
    requested_session(request)
    # The decoded path of the scope has lost bytes that are not UTF-8.
    raw: bytes = request.scope["raw_path"]
    _, _, encoded = raw.partition(b"/file/")
    path = unquote_to_bytes(encoded).decode("utf-8", "surrogateescape")
    if not path.strip("/"):
        raise BridgeError(400, "file path must not be empty")
    return workspace_path(f"/{path}")


class PersistQuery(msgspec.Struct):
    """Paths in the workspace to leave out, separated by commas."""

    excludes: str = ""


@bridge_route(
    "POST",
    "/v1/sandbox/{id}/persist",
    "persistWorkspace",
    returns=BYTES,
    errors=(400, 403, 502),
    reads=True,
)
async def persist(call: ApiCall, query: PersistQuery) -> Response:
    """Download the workspace as a tar archive, without the paths in `excludes`."""
    named = query.excludes.split(",")
    if any(".." in name for name in named):
        raise BridgeError(400, 'exclude paths must not contain ".."')
    sandbox = sandbox_of(call.request)
    top = await resolve_contained(sandbox, WORKSPACE)
    # With a slash in front a pattern is a path from the top, not a name at any depth.
    exclude = [f"/{glob.escape(name.removeprefix('./'))}" for name in named if name.strip("./")]
    source = _with_dot_prefix(sandbox.files.download_tar(top, exclude=exclude))
    try:
        first = await anext(source)
    except SmokeboxError as error:
        raise operation_failed("persist", error, "workspace_archive_read_error") from error
    return StreamingResponse(resume(first, source), media_type=BYTES)


@bridge_route(
    "POST",
    "/v1/sandbox/{id}/hydrate",
    "hydrateWorkspace",
    accepts=BYTES,
    errors=(400, 403, 502),
)
async def hydrate(call: ApiCall) -> Ok:
    """Unpack a tar archive of at most 32 MiB into the workspace, overwriting files."""
    too_large = BridgeError(400, f"tar payload too large: the limit is {MAX_UPLOAD} bytes")
    check_length(call.request, too_large)
    pieces = limit_size(call.chunks(), too_large)
    first = await anext(pieces, b"")
    if not first:
        raise BridgeError(400, "Empty tar payload")
    sandbox = sandbox_of(call.request)
    top = await resolve_contained(sandbox, WORKSPACE)
    try:
        await sandbox.files.upload_tar(top, resume(first, pieces))
    except SmokeboxError as error:
        raise operation_failed("hydrate", error, "workspace_archive_write_error") from error
    return Ok()


async def _with_dot_prefix(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Rename the members of an archive to `./name`, as tar does for a directory."""
    renamer = _TarRenamer()
    async with contextlib.aclosing(source):
        async for piece in source:
            if piece and (renamed := renamer.feed(piece)):
                yield renamed


class _TarRenamer:
    """Puts `./` before the names in an archive of ours, in constant memory."""

    def __init__(self) -> None:
        self._source = TarSource()
        self._renamed = bytearray()
        self._work = self._rename()
        next(self._work)

    def feed(self, data: bytes) -> bytes:
        with contextlib.suppress(StopIteration):
            self._work.send(data)
        renamed, self._renamed = bytes(self._renamed), bytearray()
        return renamed

    def _rename(self) -> Generator[None, bytes, None]:
        while (member := (yield from next_member(self._source))) is not None:
            if member.name != ".":
                member.name = f"./{member.name}"
            if member.islnk():
                member.linkname = f"./{member.linkname}"
            # They hold the old names.
            member.pax_headers = {}
            self._renamed += member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            remaining = padded(member.size) if member.isreg() else 0
            while remaining:
                piece = yield from self._source.some(remaining)
                self._renamed += piece
                remaining -= len(piece)
        self._renamed += bytes(tarfile.RECORDSIZE)
