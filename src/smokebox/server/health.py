"""Health checks of a server, and its drain, which finishes requests before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from smokebox.errors import ServiceUnavailable, SmokeboxError
from smokebox.wire import API

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.server.state import ServerState

METRICS = "/metrics"
PROBES = frozenset({f"{API}/health", f"{API}/ready", f"{API}{METRICS}", METRICS})
"""Paths for supervisors and monitoring: served until the end, and not counted as activity."""

_DEADLINE = 5.0
# Reuse a result for this long: the check needs no key, and may be requested at any rate.
_FRESH_SECONDS = 1.0
_PROBE = b"\0" * 4096


class HealthCheck:
    """Checks that the engine responds and that its state directory can be written."""

    def __init__(self) -> None:
        self._checked_at = float("-inf")
        self._problem: str | None = None
        self._lock = asyncio.Lock()

    async def check(self, state: ServerState) -> None:
        """Raise `ServiceUnavailable` if the server should not get requests."""
        if state.drain.begun:
            raise state.drain.refusal()
        async with self._lock:
            if time.monotonic() - self._checked_at > _FRESH_SECONDS:
                self._problem = await _find_problem(state)
                self._checked_at = time.monotonic()
        if self._problem is not None:
            raise ServiceUnavailable(
                f"the server is not ready: {self._problem}.",
                hint="Check its log, and the disk of its state directory.",
                service="server",
                reason="not ready",
            )


async def _find_problem(state: ServerState) -> str | None:
    try:
        async with asyncio.timeout(_DEADLINE):
            # Queries the record. No id starts with this character, so nothing is found.
            await state.host.list(prefix="\x7f")
            await asyncio.to_thread(_write, os.path.join(state.settings.home, ".ready"))
    except TimeoutError:
        return f"its state directory does not respond within {_DEADLINE:g} s"
    except SmokeboxError as error:
        return error.message.rstrip(".")
    except OSError as error:
        return f"its state directory cannot be written: {error.strerror}"
    return None


def _write(path: str) -> None:
    """Write a few bytes: a full disk still lets an empty file be created."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, _PROBE)
        finally:
            os.close(file)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


# Seconds that cancelled requests have to send an error.
_CANCEL_SECONDS = 2.0
# Seconds after which the next server may be up.
_RETRY_AFTER = 2.0


class Drain:
    """The running requests of a server, and the state of its shutdown.

    Once `started`, new requests are refused. Running ones have some time; then they are
    cancelled, which `cut` tells from the cancellation of a client that disconnected. With
    `keep` the sandboxes keep running for the next server, so a restart or an upgrade ends no
    processes.
    """

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.keep = False
        self.cut = False
        self.last_request = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._exempt = 0
        self._changed = asyncio.Event()

    @property
    def begun(self) -> bool:
        """True once new requests are refused."""
        return self.started.is_set()

    @property
    def requests(self) -> int:
        """Number of running requests."""
        return len(self._tasks)

    def begin(self, *, keep: bool) -> None:
        """Begin the shutdown. Only the `keep` of the first call counts."""
        if not self.begun:
            self.keep = keep
            self.started.set()

    def stop_waiting(self) -> None:
        """Cancel running requests without waiting for them."""
        self.cut = True
        self._changed.set()

    def add(self, task: asyncio.Task[None]) -> None:
        """Add the task of a request."""
        self._tasks.add(task)

    def remove(self, task: asyncio.Task[None]) -> None:
        """Remove the task of a finished request."""
        self._tasks.discard(task)
        self.last_request = time.monotonic()
        if self.begun:
            self._changed.set()

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Mark a request that lasts as long as its client wants: the drain does not wait for it."""
        self._exempt += 1
        try:
            yield
        finally:
            self._exempt -= 1

    async def finish(self, seconds: float) -> None:
        """Wait for running requests, and cancel those that take longer than `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._tasks) > self._exempt and not self.cut:
                    self._changed.clear()
                    await self._changed.wait()
        self.cut = True
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks.copy(), timeout=_CANCEL_SECONDS)

    def refusal(self) -> ServiceUnavailable:
        """Return the error for a request that is refused or cancelled."""
        return ServiceUnavailable(
            "the server is about to stop.",
            hint="Retry in a moment: the next server has the same sandboxes.",
            service="server",
            reason="draining",
            retry_after=_RETRY_AFTER,
        )
