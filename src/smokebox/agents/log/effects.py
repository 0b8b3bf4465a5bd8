"""What records change in the row that a store keeps of their session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.agents.log.records import (
    SessionCreated,
    ToolEnded,
    UserSaid,
    WorkAccepted,
    WorkEnded,
)
from smokebox.agents.messages import Image

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from smokebox.agents.log.records import Record


@dataclass(frozen=True, slots=True)
class Effect:
    """How much more work waits, whose session it is, and which blobs are of it now."""

    unfinished: int
    parent: str | None
    forked_from: str | None
    blobs: frozenset[str]


def effect(records: Sequence[Record]) -> Effect:
    """What these records change."""
    unfinished = 0
    parent = forked_from = None
    blobs: set[str] = set()
    for record in records:
        match record:
            case WorkAccepted():
                unfinished += 1
            case WorkEnded():
                unfinished -= 1
            case SessionCreated():
                parent, forked_from = record.parent, record.forked_from
        blobs.update(image.blob for image in _images(record))
    return Effect(unfinished, parent, forked_from, frozenset(blobs))


def _images(record: Record) -> Iterator[Image]:
    match record:
        case ToolEnded():
            yield from record.result.images
        case UserSaid() | WorkAccepted() if record.message is not None:
            yield from (part for part in record.message.parts if isinstance(part, Image))
