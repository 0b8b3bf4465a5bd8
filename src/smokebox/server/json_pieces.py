"""JSON of large values in pieces.

The encoder keeps the event loop until it is done, in a thread too: 40 to 160 ms for the output of
one command.
"""

from __future__ import annotations

import secrets
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Characters of a text, and items of a list, above which a field is encoded in pieces of this size.
PIECE_LENGTH = 1 << 17
PIECE_ITEMS = 500
_LONGEST: dict[type, int] = {str: PIECE_LENGTH, list: PIECE_ITEMS}


def large_fields(value: object) -> dict[str, Any]:
    """Return the large texts and lists of a dataclass or a struct, by field."""
    found: dict[str, Any] = {}
    for name in _field_names(type(value)):
        field = getattr(value, name)
        longest = _LONGEST.get(type(field))
        if longest is not None and len(field) > longest:
            found[name] = field
    return found


def encode_pieces(value: Any, large: Mapping[str, Any]) -> Iterator[bytes]:
    """Encode an object with these large fields."""
    # Random, so that no other field has such a text.
    marks = {name: secrets.token_hex(16) for name in large}
    change = msgspec.structs.replace if isinstance(value, msgspec.Struct) else replace
    rest = msgspec.json.encode(change(value, **marks))
    for name, mark in sorted(marks.items(), key=lambda pair: rest.index(pair[1].encode())):
        before, _, rest = rest.partition(f'"{mark}"'.encode())
        yield before
        yield from _encode_field(large[name])
    yield rest


_known_names: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    names = _known_names.get(kind)
    if names is None:
        names = tuple(one.name for one in fields(kind)) if is_dataclass(kind) else ()
        if issubclass(kind, msgspec.Struct):
            names = kind.__struct_fields__
        _known_names[kind] = names
    return names


def _encode_field(field: str | list[Any]) -> Iterator[bytes]:
    is_text = isinstance(field, str)
    size = PIECE_LENGTH if is_text else PIECE_ITEMS
    between = b"" if is_text else b","
    yield b'"' if is_text else b"["
    for start in range(0, len(field), size):
        # Without the quotes or brackets of the part.
        part = msgspec.json.encode(field[start : start + size])[1:-1]
        yield between + part if start else part
    yield b'"' if is_text else b"]"
