"""How far a copy is, on one line of the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from smokebox.cli.table import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What is over sooner needs no bar, and nobody reads faster than it is drawn.
_FIRST = 1.0
_BETWEEN = 0.1
_WIDTH = 24
_CLEAR = "\r\x1b[K"


@contextlib.contextmanager
def progress(name: str) -> Iterator[Callable[[int, int | None], None] | None]:
    """Who is to be told of the bytes that have passed; None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(name)
    try:
        yield bar.tell
    finally:
        bar.clear()


class _Bar:
    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()
        self._next = self._began + _FIRST
        self._shown = False

    def tell(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._shown = now + _BETWEEN, True
        speed = f"{size(done / (now - self._began))}/s"
        if total:
            full = min(_WIDTH, done * _WIDTH // total)
            bar = f"[{'#' * full}{'.' * (_WIDTH - full)}] {size(done)} of {size(total)}"
        else:
            bar = size(done)
        sys.stderr.write(f"{_CLEAR}{self._name}  {bar}  {speed}")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
