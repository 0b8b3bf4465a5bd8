"""Tar archives of directories, packed and unpacked as a stream."""

from __future__ import annotations

import contextlib

from starlette.responses import Response

from smokebox.errors import DeadlineExceeded, LimitReached, Unsupported
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.responses import ByteResponse, read_batches
from smokebox.server.routes.files import READ_ERRORS, WRITE_ERRORS
from smokebox.types import Extracted
from smokebox.wire.requests import ReadArchive, WriteArchive

TAR = "application/x-tar"
GZIP = "application/gzip"
_BASE = "/sandboxes/{id}/archive"


@endpoint("GET", _BASE, errors=READ_ERRORS, returns=f"{TAR}, {GZIP}")
async def read(call: ApiCall, query: ReadArchive) -> Response:
    """Download a directory or a file as a tar archive, gzipped with `compress`.

    Names in it are relative to the directory. It contains files, directories and symlinks,
    without those that `exclude` matches. An error closes the connection before the end of the
    response, so a complete response is a complete archive.
    """
    files = call.sandbox.files
    media = GZIP if query.compress else TAR
    if call.request.method == "HEAD":
        await files.stat(query.path)
        return Response(headers={"content-type": media})
    return ByteResponse(
        files.download_tar(query.path, compress=query.compress, exclude=query.exclude),
        media_type=media,
    )


@endpoint(
    "PUT",
    _BASE,
    errors=(*WRITE_ERRORS, LimitReached, Unsupported, DeadlineExceeded),
    accepts=TAR,
)
async def write(call: ApiCall, query: WriteArchive) -> Extracted:
    """Unpack the tar archive in the body, gzipped or not, into a directory.

    The directory is created if needed, and nothing is written outside of it. Files unpacked
    before a failure stay; `member`, `files` and `bytes` of the error tell how many.
    """
    files = call.sandbox.files
    async with contextlib.aclosing(read_batches(call)) as body:
        return await files.upload_tar(query.path, body, keep_owner=query.keep_owner)


ENDPOINTS = [read, write]
