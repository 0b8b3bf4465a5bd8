"""The workspace as a tar archive: out of the sandbox, and into it."""

from __future__ import annotations

import contextlib
import glob
import tarfile
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse

from smokebox.engine.files.tarstream import Source, next_member, padded
from smokebox.errors import SmokeboxError
from smokebox.server.call import Call
from smokebox.server.compat.files import BYTES, MAX_UPLOAD, at_most, refuse_longer, resumed
from smokebox.server.compat.ids import sandbox_of
from smokebox.server.compat.messages import ok
from smokebox.server.compat.refusal import Refusal, failed
from smokebox.server.compat.workspace import WORKSPACE, contained

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator


async def persist(call: Call) -> Response:
    """The workspace, without what `excludes` names: paths in it, parted by commas."""
    named = call.request.query_params.get("excludes", "").split(",")
    if any(".." in name for name in named):
        raise Refusal(400, 'exclude paths must not contain ".."')
    sandbox = sandbox_of(call.request)
    top = await contained(sandbox, WORKSPACE)
    # With a slash in front a pattern is a path from the top, not a name at any depth.
    exclude = [f"/{glob.escape(name.removeprefix('./'))}" for name in named if name.strip("./")]
    source = _dotted(sandbox.files.download_tar(top, exclude=exclude))
    try:
        first = await anext(source)
    except SmokeboxError as error:
        raise failed("persist", error, "workspace_archive_read_error") from error
    return StreamingResponse(resumed(first, source), media_type=BYTES)


async def hydrate(call: Call) -> Response:
    """Unpack an archive into the workspace, over what is there."""
    too_large = Refusal(400, f"tar payload too large: the limit is {MAX_UPLOAD} bytes")
    refuse_longer(call.request, too_large)
    pieces = at_most(call.pieces(), too_large)
    first = await anext(pieces, b"")
    if not first:
        raise Refusal(400, "Empty tar payload")
    sandbox = sandbox_of(call.request)
    top = await contained(sandbox, WORKSPACE)
    try:
        await sandbox.files.upload_tar(top, resumed(first, pieces))
    except SmokeboxError as error:
        raise failed("hydrate", error, "workspace_archive_write_error") from error
    return ok()


async def _dotted(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """An archive whose members are called `./name`, as tar calls those of a directory."""
    renaming = _Renaming()
    async with contextlib.aclosing(source):
        async for piece in source:
            if piece and (renamed := renaming.feed(piece)):
                yield renamed


class _Renaming:
    """Puts `./` before the names in an archive of ours, in constant memory."""

    def __init__(self) -> None:
        self._source = Source()
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
            # They would say the names of before.
            member.pax_headers = {}
            self._renamed += member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            left = padded(member.size) if member.isreg() else 0
            while left:
                piece = yield from self._source.some(left)
                self._renamed += piece
                left -= len(piece)
        self._renamed += bytes(tarfile.RECORDSIZE)
