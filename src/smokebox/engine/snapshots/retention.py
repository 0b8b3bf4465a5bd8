"""Retention of snapshots: which ones of a sandbox are removed."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.options import check_keep_last, parse_duration
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.engine.record.rows import SnapshotRow
    from smokebox.types import SnapshotOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keep the last snapshots, and those of the last seconds. None is no such rule.

    A snapshot is kept if either rule keeps it. Those with a name are always kept. Snapshots of each
    origin are counted on their own.
    """

    keep_last: int | None = None
    keep_for: float | None = None

    def outdated(
        self,
        rows: Sequence[SnapshotRow],
        *,
        origin: SnapshotOrigin | None = None,
        upcoming: int = 0,
    ) -> list[SnapshotRow]:
        """Return the snapshots of a sandbox that are not kept.

        Args:
            rows: Its snapshots, oldest first.
            origin: Return only those of this origin.
            upcoming: Number of snapshots of the origin without a name that it gets next.
        """
        origins = sorted({row.origin for row in rows}) if origin is None else [origin]
        return [row for one in origins for row in self._outdated(rows, one, upcoming)]

    def _outdated(
        self, rows: Sequence[SnapshotRow], origin: SnapshotOrigin, upcoming: int
    ) -> list[SnapshotRow]:
        ready = [row for row in rows if row.origin == origin and row.status == "ready"]
        unnamed = [row for row in ready if row.name is None]
        if self.keep_last is not None:
            unnamed = unnamed[: max(len(unnamed) + upcoming - self.keep_last, 0)]
        if self.keep_for is not None:
            since = time.time() - self.keep_for
            unnamed = [row for row in unnamed if row.created_at < since]
        return unnamed


def parse_retention(keep_last: object, keep_for: float | str | None) -> Retention | None:
    """Return the rules that a user passed, or None without any. Raises `InvalidOption`."""
    if keep_last is None and keep_for is None:
        return None
    last = None if keep_last is None else check_keep_last(keep_last)
    with contextlib.suppress(TypeError, ValueError):
        # Queries have text only.
        keep_for = float(keep_for or "")
    seconds = None if keep_for is None else parse_duration("keep_for", keep_for)
    return Retention(keep_last=last, keep_for=seconds)


def no_retention() -> InvalidOption:
    """Return the error for a removal without a rule."""
    return InvalidOption(
        "keep_last or keep_for says which snapshots are kept, and neither was passed.",
        hint="Pass for example keep_last=10, or delete single snapshots.",
        option="keep_last",
        value=None,
    )
