"""Reading bodies of requests and responses, and decoding them from JSON to checked values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from smokebox.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(kind: type[T], data: bytes) -> T:
    """Decode JSON as a value of type `kind`. Raises `msgspec.MsgspecError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        value: T = decoder.decode(data)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    return value


async def whole(pieces: AsyncIterable[bytes], limit: int, *, hint: str) -> bytes:
    """Read a body of at most `limit` bytes. Raises `RequestTooLarge` as soon as it is longer."""
    read, size = [], 0
    async for piece in pieces:
        size += len(piece)
        if size > limit:
            raise RequestTooLarge(
                f"the body of this request is longer than {limit} bytes.", hint=hint, limit=limit
            )
        read.append(piece)
    return b"".join(read)
