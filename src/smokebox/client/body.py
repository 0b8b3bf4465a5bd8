"""The bodies of requests: fields as JSON, and bytes in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

# What the kernel and the event loop hold of a body without waiting for who reads it.
_AT_ONCE = 1 << 16


def pieces_of(data: bytes | AsyncIterable[bytes] | None) -> bytes | AsyncIterable[bytes]:
    """A body as it is sent: as bytes where nobody has to be waited for, else in pieces."""
    if data is None:
        return b""
    if isinstance(data, bytes) and len(data) > _AT_ONCE:
        return _slices(data)
    return data


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
