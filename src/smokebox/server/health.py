"""Whether a server lives, and whether it can work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from smokebox.errors import ServiceUnavailable, SmokeboxError
from smokebox.wire import API

if TYPE_CHECKING:
    from smokebox.server.state import State

METRICS = "/metrics"
PROBES = frozenset({f"{API}/health", f"{API}/ready", f"{API}{METRICS}", METRICS})
"""What whoever minds a server asks: answered to its end, and no sign that anybody uses it."""

_DEADLINE = 5.0
# Anybody may ask, and as often as they like.
_FRESH_SECONDS = 1.0
_PROBE = b"\0" * 4096


class Health:
    """Whether the engine is open and its state directory can be written."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._trouble: str | None = None
        self._looking = asyncio.Lock()

    async def check(self, state: State) -> None:
        """Raise `ServiceUnavailable` for a server that should not be sent requests."""
        if state.drain.begun:
            raise state.drain.refusal()
        async with self._looking:
            if time.monotonic() - self._looked_at > _FRESH_SECONDS:
                self._trouble = await _trouble(state)
                self._looked_at = time.monotonic()
        if self._trouble is not None:
            raise ServiceUnavailable(
                f"the server cannot work: {self._trouble}.",
                hint="Look at its log, and at the disk of its state directory.",
                service="server",
                reason="not ready",
            )


async def _trouble(state: State) -> str | None:
    try:
        async with asyncio.timeout(_DEADLINE):
            # Ids are ASCII: none begins so. The record is asked, and finds nothing.
            await state.host.list(prefix="\x7f")
            await asyncio.to_thread(_write, os.path.join(state.settings.home, ".ready"))
    except TimeoutError:
        return f"its state directory does not answer in {_DEADLINE:g} s"
    except SmokeboxError as error:
        return error.message.rstrip(".")
    except OSError as error:
        return f"its state directory cannot be written: {error.strerror}"
    return None


def _write(path: str) -> None:
    """Write as a record would; a disk that is full shows with the bytes, not with the file."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, _PROBE)
        finally:
            os.close(file)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
