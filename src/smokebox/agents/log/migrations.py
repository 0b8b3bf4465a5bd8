"""How older records are brought to the version of this code, and how they are written.

Two things have a version: the tables of a store, changed once when it is opened, and each
record, which stays as it was written and is brought up to date as it is read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.agents.log.records import VERSION, Record
from smokebox.errors import StoreTooNew

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Version -> what makes a record of the next version from the JSON of one of this. Those that
# were released never change.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """A record as JSON, of the version that this code writes.

    What no encoding has, such as half of a surrogate pair that a model wrote, becomes `?`.
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(record), ensure_ascii=False)
        return text.encode(errors="replace")


def decode(
    data: bytes,
    version: int,
    *,
    where: str,
    latest: int = VERSION,
    upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = UPGRADES,
) -> Record:
    """The record that was written so by some version up to this. Raises `StoreTooNew`."""
    if version > latest:
        raise too_new(f"a record of {where}", version, latest)
    if version == latest:
        return _decoder.decode(data)
    value = msgspec.json.decode(data)
    for older in range(version, latest):
        value = upgrades[older](value)
    return _decoder.decode(_encoder.encode(value))


def too_new(what: str, version: int, latest: int) -> StoreTooNew:
    """What to say of something that a later version wrote."""
    return StoreTooNew(
        f"{what} is of version {version}, from a later Smokebox: this one knows versions up to "
        f"{latest}.",
        hint="Upgrade Smokebox, or give persist= another place.",
        version=version,
        latest=latest,
    )
