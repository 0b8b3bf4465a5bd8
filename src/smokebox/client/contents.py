"""Upload of contents by digest: only those that the server lacks are sent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import PathError, from_os_error
from smokebox.wire.build_requests import FindContents
from smokebox.wire.responses import MissingContents

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

    from smokebox.client.transport import Transport

_UPLOADS_AT_ONCE = 4
_CHUNK = 1 << 20
# Digests of one question to the server.
_BATCH = 5000


@dataclass(frozen=True, slots=True)
class LocalContent:
    """A local file, or `size` bytes of it from `start`."""

    path: str
    start: int = 0
    size: int | None = None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes. Raises `PathError`."""
        try:
            file = await asyncio.to_thread(open, self.path, "rb")
            with file:
                remaining = os.fstat(file.fileno()).st_size if self.size is None else self.size
                file.seek(self.start)
                while remaining and (
                    chunk := await asyncio.to_thread(file.read, min(_CHUNK, remaining))
                ):
                    remaining -= len(chunk)
                    yield chunk
        except OSError as error:
            if isinstance(error, PathError):
                raise
            raise from_os_error(error, self.path) from error


async def missing_contents(transport: Transport, digests: Iterable[str]) -> list[str]:
    """Return those digests whose content the server lacks."""
    wanted, missing = sorted(digests), list[str]()
    for start in range(0, len(wanted), _BATCH):
        body = FindContents(digests=wanted[start : start + _BATCH])
        found = await transport.request(MissingContents, "POST", "/builds/contents", body=body)
        missing += found.digests
    return missing


async def upload_contents(
    transport: Transport,
    contents: Mapping[str, LocalContent],
    digests: Iterable[str],
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Upload contents by their digests, several at once.

    Args:
        transport: The server.
        contents: All contents by their digests.
        digests: Those to upload.
        progress: Called with a digest and the number of bytes sent so far.
    """
    slots = asyncio.Semaphore(_UPLOADS_AT_ONCE)

    async def chunks(digest: str) -> AsyncGenerator[bytes, None]:
        sent = 0
        async with contextlib.aclosing(contents[digest].chunks()) as pieces:
            async for piece in pieces:
                yield piece
                sent += len(piece)
                if progress is not None:
                    progress(digest, sent)

    async def send(digest: str) -> None:
        async with slots:
            await transport.request(
                type(None),
                "PUT",
                "/builds/contents",
                query={"digest": digest},
                data=chunks(digest),
                timeout=None,
            )

    try:
        async with asyncio.TaskGroup() as group:
            for digest in digests:
                group.create_task(send(digest))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
