"""Which files of a project have changed."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_SECONDS = 0.5
_SUFFIXES = (".py", ".toml", ".md", ".env")
_LEFT_ALONE = frozenset(("__pycache__", "node_modules", "dist", "build", "venv"))


async def changes(folder: Path) -> AsyncIterator[list[str]]:
    """The names of files that were written, made or removed, each time some were."""
    before = await asyncio.to_thread(_look, str(folder))
    while True:
        await asyncio.sleep(_SECONDS)
        after = await asyncio.to_thread(_look, str(folder))
        if after != before:
            # An editor writes several files, or one in several steps.
            while (later := await asyncio.to_thread(_look, str(folder))) != after:
                after = later
            changed = dict(before.items() ^ after.items())
            before = after
            yield sorted(changed)


def _look(folder: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith(".") and one not in _LEFT_ALONE]
        for file in files:
            if file.endswith(_SUFFIXES):
                path = os.path.join(root, file)
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                found[os.path.relpath(path, folder)] = (status.st_mtime_ns, status.st_size)
    return found
