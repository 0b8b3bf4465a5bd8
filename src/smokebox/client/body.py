"""The bodies of requests: sent in pieces, and given up when nobody takes them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from smokebox import wire
from smokebox.client.answering import lost
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

# What the kernel and the event loop hold of a body without waiting for who reads it.
_AT_ONCE = 1 << 16


class Sent:
    """A body under way. `over` a request, it ends one whose body nobody takes for too long."""

    def __init__(self, data: bytes | AsyncIterable[bytes] | None) -> None:
        self._data = data
        self._scope: asyncio.Timeout | None = None
        self._fault: Exception | None = None

    @property
    def content(self) -> bytes | AsyncGenerator[bytes, None] | None:
        """What aiohttp takes."""
        if self._data is None or (isinstance(self._data, bytes) and is_small(self._data)):
            return self._data
        return self._watched(self._data)

    @property
    def headers(self) -> dict[str, str]:
        """How long it is, where that is known."""
        return {"content-length": str(len(self._data))} if isinstance(self._data, bytes) else {}

    @contextlib.asynccontextmanager
    async def over(self, what: str) -> AsyncIterator[None]:
        """Raise `SandboxGone` within once no piece of the body is taken any more.

        What the source of the body raised is raised as it is.
        """
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except Exception as error:
            if self._fault is not None:
                raise self._fault from None
            if isinstance(error, TimeoutError) and self._scope and self._scope.expired():
                raise lost(what) from error
            raise
        finally:
            self._scope = None

    async def _watched(self, data: bytes | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        pieces = _slices(data) if isinstance(data, bytes) else data
        try:
            async for piece in pieces:
                # The time between pieces is the caller's own; that within, the server's.
                self._expect(wire.SILENCE)
                yield piece
                self._expect(None)
        except Exception as error:
            self._fault = error
            raise
        finally:
            self._expect(None)

    def _expect(self, seconds: float | None) -> None:
        scope = self._scope
        if scope is not None and not scope.expired():
            now = asyncio.get_running_loop().time()
            scope.reschedule(None if seconds is None else now + seconds)


def is_small(data: bytes | AsyncIterable[bytes] | None) -> bool:
    """Whether a body is sent without waiting for who reads it."""
    return data is None or (isinstance(data, bytes) and len(data) <= _AT_ONCE)


def encoded(body: object) -> bytes | None:
    """A body of fields, as JSON."""
    try:
        return None if body is None else msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise InvalidOption(
            f"{error.object[:80]!r} holds a character that UTF-8 cannot, at {error.start}.",
            hint="Leave it out, or write bytes to a file.",
            option="body",
        ) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOption(
            f"this cannot be sent to a server: {error}.",
            hint="Pass text, numbers, lists and mappings.",
            option="body",
        ) from error


async def _slices(data: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(data)
    for start in range(0, len(data), _AT_ONCE):
        yield bytes(view[start : start + _AT_ONCE])
