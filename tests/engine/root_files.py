"""`Files` over a plain directory instead of the root of a sandbox."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from smokebox.engine.files.files import Files
from smokebox.engine.files.rooted_files import MAX_READ
from smokebox.engine.jail.spec import Owner

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.workers import Workers

ME = Owner(uid=os.geteuid(), gid=os.getegid(), count=1)


def files_of(root: Path, workers: Workers, owner: Owner = ME, max_read: int = MAX_READ) -> Files:
    """Return files whose root is opened for each call, and closed right after it was passed on."""

    async def open_root() -> tuple[int, Owner]:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        asyncio.get_running_loop().call_soon(os.close, fd)
        return fd, owner

    return Files(open_root, workers=workers, max_read=max_read)
