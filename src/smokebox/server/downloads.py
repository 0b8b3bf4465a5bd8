"""Downloads of files, whole or a range; a small file takes one call to the engine.

A file may change while it is read. A response has a Content-Length if the file was the same before
and after its first bytes were read: bytes appended later are not sent, and if the file is truncated
the connection is closed. A file that changes at each attempt is sent to its end, without a length.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.responses import Response

from smokebox.errors import InvalidOption
from smokebox.server.endpoint import BYTES, JSON
from smokebox.server.responses import SMALL, ByteResponse
from smokebox.wire.failure import FailureResponse, failure_of

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from smokebox.engine.files.files import Files
    from smokebox.server.endpoint import ApiCall
    from smokebox.types import FileInfo

# A browser must not render files of a sandbox as pages of this server.
_HEADERS = {
    "accept-ranges": "bytes",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}
_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE)
_ATTEMPTS = 3


class ByteRange(NamedTuple):
    """A part of a file."""

    start: int
    length: int


async def download(call: ApiCall, files: Files, path: str) -> Response:
    """Respond to a GET or HEAD of a file."""
    headers = call.request.headers
    if call.request.method == "HEAD":
        return await _respond_to_head(files, path)
    if "range" in headers:
        response = await _respond_with_range(call, files, path, headers)
        if response is not None:
            return response
    data = await files.read_range(path, 0, SMALL + 1)
    if len(data) <= SMALL:
        return Response(data, headers=_HEADERS, media_type=BYTES)
    return await _respond_with_stream(files, path)


async def _respond_to_head(files: Files, path: str) -> Response:
    await _check_readable(files, path)
    info = await files.stat(path)
    return Response(headers=_headers(info, info.size), media_type=BYTES)


async def _respond_with_stream(files: Files, path: str) -> Response:
    for _ in range(_ATTEMPTS):
        info = await files.stat(path)
        whole = ByteRange(0, info.size or 0)
        response = await _respond_if_unchanged(files, path, info, whole, 200, _headers(info))
        if response is not None:
            return response
    return ByteResponse(files.read_stream(path), media_type=BYTES, headers=_HEADERS)


async def _respond_with_range(
    call: ApiCall, files: Files, path: str, headers: Headers
) -> Response | None:
    """Respond with the requested range; None if the header is to be ignored."""
    for _ in range(_ATTEMPTS):
        info = await files.stat(path)
        size = info.size or 0
        if headers.get("if-range", _etag(info)) != _etag(info):
            return None
        requested = parse_range(headers["range"], size)
        if requested is None:
            return None
        span = requested
        if not span.length:
            await _check_readable(files, path)
            return _unsatisfiable(call, headers["range"], size)
        described = {**_headers(info), "content-range": _content_range(span, str(size))}
        response = await _respond_if_unchanged(files, path, info, span, 206, described)
        if response is not None:
            return response
    return ByteResponse(
        files.read_stream(path, offset=span.start, length=span.length),
        media_type=BYTES,
        size=span.length,
        status=206,
        headers={**_HEADERS, "content-range": _content_range(span, "*")},
    )


def parse_range(header: str, size: int) -> ByteRange | None:
    """Parse a Range header for a file of `size` bytes; length 0 if the file has none of them.

    None for anything but one range of bytes, which a server may or must ignore.
    """
    found = _RANGE.fullmatch(header)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        length = min(int(found[2]), size)
        return ByteRange(size - length, length)
    start = int(found[1])
    if found[2] and int(found[2]) < start:
        return None
    end = min(int(found[2]) + 1, size) if found[2] else size
    return ByteRange(start, max(0, end - start))


async def _respond_if_unchanged(
    files: Files, path: str, info: FileInfo, span: ByteRange, status: int, headers: dict[str, str]
) -> Response | None:
    """Respond with a part of the file; None if it has changed since `info`."""
    if span.length <= SMALL:
        data = await files.read_range(path, span.start, span.length)
        same = len(data) == span.length and await _is_unchanged(files, path, info)
        return Response(data, status, headers, BYTES) if same else None
    source = files.read_stream(path, offset=span.start, length=span.length)
    try:
        first = await anext(source, b"")
        same = bool(first) and await _is_unchanged(files, path, info)
    except BaseException:
        await source.aclose()
        raise
    if not same:
        await source.aclose()
        return None
    return ByteResponse(
        source, media_type=BYTES, first=first, size=span.length, status=status, headers=headers
    )


async def _is_unchanged(files: Files, path: str, info: FileInfo) -> bool:
    return _etag(await files.stat(path)) == _etag(info)


async def _check_readable(files: Files, path: str) -> None:
    """Raise if the path is not a readable file, which `stat` does not check."""
    await files.read_range(path, 0, 0)


def _headers(info: FileInfo, length: int | None = None) -> dict[str, str]:
    headers = {**_HEADERS, "etag": _etag(info)}
    if length is not None:
        headers["content-length"] = str(length)
    return headers


def _etag(info: FileInfo) -> str:
    return f'"{round((info.mtime or 0) * 1e6):x}-{info.size or 0:x}"'


def _content_range(span: ByteRange, total: str) -> str:
    return f"bytes {span.start}-{span.start + span.length - 1}/{total}"


def _unsatisfiable(call: ApiCall, header: str, size: int) -> Response:
    error = InvalidOption(
        f"the range {header!r} is outside the file, which has {size} bytes.",
        hint="Request a range inside the file, or leave the header Range out.",
        option="range",
        value=header,
    )
    body = msgspec.json.encode(FailureResponse(failure_of(error, call.request_id)))
    return Response(body, 416, {"content-range": f"bytes */{size}"}, JSON)
