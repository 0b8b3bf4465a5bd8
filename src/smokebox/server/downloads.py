"""Files as answers: whole or a range of one, in one call to the engine where they are small.

A file may change while it is read. An answer that says its length is of a file that looked
the same before and after it was opened: what is appended later is not sent, and one that
is cut short breaks the connection off. A file that never looks the same twice is sent to
its end, without a length.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.responses import Response

from smokebox.errors import InvalidOption
from smokebox.server.endpoint import BYTES, JSON
from smokebox.server.streams import SMALL, ByteResponse
from smokebox.wire.failure import FailureAnswer, failure_of

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from smokebox.engine.files.files import Files
    from smokebox.server.call import Call
    from smokebox.types import FileInfo

# What a sandbox holds is never a page of this server, whatever a browser makes of it.
_HEADERS = {
    "accept-ranges": "bytes",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}
_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE)
_TRIES = 3


class Span(NamedTuple):
    """A part of a file."""

    start: int
    length: int


async def download(call: Call, files: Files, path: str) -> Response:
    """The answer to a GET or a HEAD of a file."""
    headers = call.request.headers
    if call.request.method == "HEAD":
        return await _described(files, path)
    if "range" in headers:
        part = await _part(call, files, path, headers)
        if part is not None:
            return part
    data = await files.read_range(path, 0, SMALL + 1)
    if len(data) <= SMALL:
        return Response(data, headers=_HEADERS, media_type=BYTES)
    return await _long(files, path)


async def _described(files: Files, path: str) -> Response:
    await _check_readable(files, path)
    info = await files.stat(path)
    return Response(headers=_headers(info, info.size), media_type=BYTES)


async def _long(files: Files, path: str) -> Response:
    for _ in range(_TRIES):
        info = await files.stat(path)
        whole = Span(0, info.size or 0)
        answer = await _opened(files, path, info, whole, 200, _headers(info))
        if answer is not None:
            return answer
    return ByteResponse(files.read_stream(path), media_type=BYTES, headers=_HEADERS)


async def _part(call: Call, files: Files, path: str, headers: Headers) -> Response | None:
    """The range that was asked for; None where that is to be ignored."""
    for _ in range(_TRIES):
        info = await files.stat(path)
        size = info.size or 0
        if headers.get("if-range", _tag(info)) != _tag(info):
            return None
        asked = span_of(headers["range"], size)
        if asked is None:
            return None
        span = asked
        if not span.length:
            await _check_readable(files, path)
            return _unsatisfiable(call, headers["range"], size)
        described = {**_headers(info), "content-range": _content_range(span, str(size))}
        answer = await _opened(files, path, info, span, 206, described)
        if answer is not None:
            return answer
    return ByteResponse(
        files.read_stream(path, offset=span.start, length=span.length),
        media_type=BYTES,
        size=span.length,
        status=206,
        headers={**_HEADERS, "content-range": _content_range(span, "*")},
    )


def span_of(header: str, size: int) -> Span | None:
    """What a Range header means for a file; of length 0 where the file has nothing there.

    None for what is not one range of bytes, which a server may, or has to, ignore.
    """
    found = _RANGE.fullmatch(header)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        length = min(int(found[2]), size)
        return Span(size - length, length)
    start = int(found[1])
    if found[2] and int(found[2]) < start:
        return None
    end = min(int(found[2]) + 1, size) if found[2] else size
    return Span(start, max(0, end - start))


async def _opened(
    files: Files, path: str, info: FileInfo, span: Span, status: int, headers: dict[str, str]
) -> Response | None:
    """The answer with a part of the file that `info` is of; None if that is another by now."""
    if span.length <= SMALL:
        data = await files.read_range(path, span.start, span.length)
        same = len(data) == span.length and await _is_same(files, path, info)
        return Response(data, status, headers, BYTES) if same else None
    source = files.read_stream(path, offset=span.start, length=span.length)
    try:
        first = await anext(source, b"")
        same = bool(first) and await _is_same(files, path, info)
    except BaseException:
        await source.aclose()
        raise
    if not same:
        await source.aclose()
        return None
    return ByteResponse(
        source, media_type=BYTES, first=first, size=span.length, status=status, headers=headers
    )


async def _is_same(files: Files, path: str, info: FileInfo) -> bool:
    return _tag(await files.stat(path)) == _tag(info)


async def _check_readable(files: Files, path: str) -> None:
    """Raise for what is no file, or not to be read, as `stat` does not."""
    await files.read_range(path, 0, 0)


def _headers(info: FileInfo, length: int | None = None) -> dict[str, str]:
    headers = {**_HEADERS, "etag": _tag(info)}
    if length is not None:
        headers["content-length"] = str(length)
    return headers


def _tag(info: FileInfo) -> str:
    return f'"{round((info.mtime or 0) * 1e6):x}-{info.size or 0:x}"'


def _content_range(span: Span, total: str) -> str:
    return f"bytes {span.start}-{span.start + span.length - 1}/{total}"


def _unsatisfiable(call: Call, header: str, size: int) -> Response:
    error = InvalidOption(
        f"the file has {size} bytes, and none in the range {header!r}.",
        hint="Ask for bytes that are there, or leave the header Range out.",
        option="range",
        value=header,
    )
    body = msgspec.json.encode(FailureAnswer(failure_of(error, call.request_id)))
    return Response(body, 416, {"content-range": f"bytes */{size}"}, JSON)
