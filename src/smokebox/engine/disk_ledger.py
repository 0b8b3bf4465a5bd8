"""Bookkeeping of a sandbox's disk use, to refuse a write of the engine before it passes the limit.

Usage is measured from time to time. What the engine has written for a client since then, and what
it is writing now, is added.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

_BLOCK = 4096


class DiskLedger:
    """Disk use of one sandbox, as far as it is known. Safe to use from several threads."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.measured: int | None = None
        self._written = 0
        self._measured_written = 0
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes in use or about to be."""
        return (self.measured or 0) + self._written - self._measured_written + self._reserved

    @property
    def room(self) -> int | None:
        """Bytes that may still be written; None for no limit."""
        return None if self.limit is None else self.limit - self.used

    def begin_measurement(self) -> int:
        """Return a mark for `end_measurement`."""
        return self._written

    def end_measurement(self, used: int, mark: int) -> None:
        """Record a measurement, which includes at least what was written before the mark."""
        with self._lock:
            self.measured = used
            self._measured_written = mark

    def reserve(self, count: int) -> bool:
        """Reserve bytes for a write; False if there is no room for them."""
        with self._lock:
            room = self.room
            if room is not None and count > room:
                return False
            self._reserved += count
            return True

    def settle(self, count: int) -> None:
        """Count reserved bytes as written."""
        with self._lock:
            self._reserved -= count
            self._written += count


class Measure(Protocol):
    """Measures the disk use of a sandbox and records it in its ledger."""

    def __call__(self, *, only_if_due: bool = False) -> Awaitable[None]:
        """Measure now, or only if the disk's free space has changed much since the last time."""


class DiskBudget:
    """Room for one write of the engine into a sandbox."""

    def __init__(self, id: str, ledger: DiskLedger, measure: Measure) -> None:
        self._id = id
        self._ledger = ledger
        self._measure = measure
        self._taken = 0

    async def prepare(self) -> None:
        """Bring the known usage up to date."""
        if self._ledger.limit is not None:
            await self._measure(only_if_due=True)

    async def reserve(self, count: int) -> None:
        """Take room for more bytes, after another measurement if there seems to be none."""
        try:
            self.take(count)
        except LimitReached:
            await self._measure()
            self.take(count)

    def take_file(self, size: int) -> None:
        """Take room for a whole file, which occupies whole blocks."""
        self.take(-(-max(size, 1) // _BLOCK) * _BLOCK)

    def take(self, count: int) -> None:
        """Take room for more bytes. Raises `LimitReached` if there is none."""
        if not self._ledger.reserve(count):
            raise LimitReached(
                f"sandbox {self._id} uses {self._ledger.used} bytes of disk, and {count} more "
                f"would pass its limit of {self._ledger.limit}.",
                hint="Remove files, for example with rm, or raise its limit: "
                "limits={'disk': '16GB'}.",
                limit="disk",
            )
        self._taken += count

    def close(self) -> None:
        """Count what was taken as written, until the next measurement."""
        self._ledger.settle(self._taken)
        self._taken = 0


async def _keep(*, only_if_due: bool = False) -> None:
    pass


@contextlib.asynccontextmanager
async def unlimited() -> AsyncIterator[DiskBudget]:
    """Provide the budget of a sandbox without a limit."""
    yield DiskBudget("", DiskLedger(), _keep)
