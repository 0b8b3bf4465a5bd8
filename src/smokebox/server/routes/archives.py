"""Directories of a sandbox as tar archives, packed and unpacked as they pass."""

from __future__ import annotations

import contextlib

from starlette.responses import Response

from smokebox.errors import DeadlineExceeded, LimitReached, Unsupported
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.routes.files import CHANGING, LOOKING
from smokebox.server.streams import ByteResponse, batches
from smokebox.types import Extracted
from smokebox.wire.requests import ReadArchive, WriteArchive

TAR = "application/x-tar"
GZIP = "application/gzip"
_BASE = "/sandboxes/{id}/archive"


@endpoint("GET", _BASE, errors=LOOKING, gives=f"{TAR}, {GZIP}")
async def read(call: Call, query: ReadArchive) -> Response:
    """Pack a directory, or a file, as a tar archive, with `compress` a gzipped one.

    Names in it are relative to the directory. What is neither a file, a directory nor a
    symlink is left out, as is what `exclude` matches. An error on the way breaks the
    connection off: an archive that ends as HTTP has it is whole.
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
    errors=(*CHANGING, LimitReached, Unsupported, DeadlineExceeded),
    takes=TAR,
)
async def write(call: Call, query: WriteArchive) -> Extracted:
    """Unpack the tar archive in the body, gzipped or not, into a directory.

    The directory is made if need be, and nothing is written outside of it. What was
    unpacked before a failure stays; the error says in `member`, `files` and `bytes` how far
    it came.
    """
    files = call.sandbox.files
    async with contextlib.aclosing(batches(call)) as body:
        return await files.upload_tar(query.path, body, keep_owner=query.keep_owner)


ENDPOINTS = [read, write]
