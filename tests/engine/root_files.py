"""The files of a sandbox without the sandbox: of a plain directory as its root."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from smokebox.engine.files.files import Files
from smokebox.engine.files.rooted import MAX_READ
from smokebox.engine.jail.api import Owner

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.workers import Workers

ME = Owner(uid=os.geteuid(), gid=os.getegid(), count=1)


def files_of(root: Path, workers: Workers, owner: Owner = ME, max_read: int = MAX_READ) -> Files:
    """Files whose root is opened anew for each call, and closed as soon as it was given."""

    async def give() -> tuple[int, Owner]:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        asyncio.get_running_loop().call_soon(os.close, fd)
        return fd, owner

    return Files(give, workers=workers, max_read=max_read)
