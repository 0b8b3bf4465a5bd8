"""JSON to checked values, by decoders that are made once for each kind."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(kind: type[T], data: bytes) -> T:
    """JSON as a value of that kind; raises `msgspec.MsgspecError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    value: T = decoder.decode(data)
    return value
