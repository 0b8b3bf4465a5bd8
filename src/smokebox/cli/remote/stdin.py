"""Standard input as it comes, on an event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_PIECE = 1 << 16
_AHEAD = 4


async def stdin_pieces() -> AsyncGenerator[bytes, None]:
    """What comes on standard input, to its end."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes | OSError] = asyncio.Queue(_AHEAD)

    def read() -> None:
        while True:
            try:
                piece: bytes | OSError = os.read(sys.stdin.fileno(), _PIECE)
            except OSError as error:
                piece = error
            try:
                asyncio.run_coroutine_threadsafe(pieces.put(piece), loop).result()
            except RuntimeError:
                return
            if not isinstance(piece, bytes) or not piece:
                return

    # A daemon: a read that nobody can end does not keep this process from ending.
    threading.Thread(target=read, daemon=True).start()
    while piece := await pieces.get():
        if isinstance(piece, OSError):
            raise piece
        yield piece
