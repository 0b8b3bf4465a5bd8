"""Which events of a conversation are of one submission."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from smokebox.app.streams import Line


class Unit:
    """Follows one piece of work through the record: what it said, asked for and came to."""

    def __init__(self, key: str) -> None:
        self.ended = False
        self._key = key
        self._work: str | None = None
        self._parts: set[str] = set()

    def takes(self, line: Line) -> bool:
        """Whether an event belongs to it."""
        record: dict[str, Any] = msgspec.json.decode(line.data)
        if line.kind == "work_accepted" and record.get("key") == self._key:
            self._work = record["work_id"]
            return True
        mine = self._work is not None and record.get("work_id") == self._work
        for part in ("reply_id", "call_id", "session"):
            if part in record:
                if mine:
                    self._parts.add(record[part])
                mine = mine or record[part] in self._parts
        if mine and line.kind == "work_ended":
            self.ended = True
        return mine
