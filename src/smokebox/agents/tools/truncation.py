"""How much a model is shown at once, in UTF-8 bytes, and cuts that leave characters whole."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_LINES = 2000
MAX_BYTES = 50 * 1024
MAX_LINE_BYTES = 500


def head(data: bytes, limit: int) -> bytes:
    """The first `limit` bytes, fewer where that would cut a character."""
    if len(data) <= limit:
        return data
    end = limit
    # A character has at most three continuation bytes; more of them is not UTF-8.
    while end > max(0, limit - 3) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


def tail(data: bytes, limit: int) -> bytes:
    """The last `limit` bytes, fewer where that would cut a character."""
    start = max(0, len(data) - limit)
    last = min(len(data), start + 3)
    while 0 < start < last and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def fitting(sizes: Iterable[int], limit: int) -> int:
    """How many lines of these sizes fit in `limit` and `MAX_BYTES`, with the breaks between."""
    count, room = 0, MAX_BYTES + 1
    for size in sizes:
        room -= size + 1
        if count == limit or room < 0:
            break
        count += 1
    return count


def fitting_lines(lines: Iterable[str], limit: int) -> int:
    """How many of `lines` fit in `limit` and `MAX_BYTES`."""
    return fitting((len(line.encode()) for line in lines), limit)


def shorten_line(line: str, limit: int = MAX_LINE_BYTES) -> str:
    """`line`, or its first `limit` bytes and an ellipsis."""
    data = line.encode()
    return line if len(data) <= limit else head(data, limit).decode() + "..."


def one_line(path: str) -> str:
    """`path` as it is, or as a JSON string where it would not stay on one line."""
    return path if path.isprintable() else json.dumps(path, ensure_ascii=False)


def shell_word(path: str) -> str:
    """`path` as a word for a command that a marker proposes."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)
