"""Watches of a sandbox's files: streams of changes that can be closed and resumed by a cursor."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from smokebox.engine.files.observer import MAX_CHANGES, FileChange, Observer
from smokebox.errors import InvalidOption, LimitReached, SandboxGone, SmokeboxError
from smokebox.foundation.ids import new_id
from smokebox.runtime.pipes import readable
from smokebox.sandbox.local_files import display_name
from smokebox.types import WatchEvent

if TYPE_CHECKING:
    from smokebox.engine.files.executor import RootExecutor, ThreadedGenerator
    from smokebox.engine.files.observer import WatchOptions

EXCLUDED = (".git", "node_modules", ".DS_Store")
LINGER_SECONDS = 60.0
MAX_WATCHES = 8
# Pause between two reads, so that a burst is read at once and a flood does not occupy a core.
PAUSE_SECONDS = 0.01


class WatchStream(AsyncIterator[WatchEvent]):
    """The events of a watch, from its start or from a cursor.

    It ends when the watched path is removed or moved away. After `aclose` the watch lingers for
    a while, and `watch(cursor=...)` resumes it. A reader that falls far behind gets one `resync`
    for what it missed.
    """

    def __init__(self, watch: _LiveWatch, position: int, *, lost: bool) -> None:
        self._watch = watch
        self._position = position
        self._lost = lost
        self._closed = False
        watch.attach()

    @property
    def cursor(self) -> str:
        """Position of this stream: a watch with it starts after the last event."""
        return f"{self._watch.id}:{self._position}"

    async def __anext__(self) -> WatchEvent:
        watch = self._watch
        while not self._closed:
            changed = watch.changed
            if self._lost or self._position < watch.first:
                self._lost = False
                self._position = watch.end
                return self._event(FileChange("resync", watch.options.path, True), time.time())
            if self._position < watch.end:
                change, seen_at = watch.history[self._position - watch.first]
                self._position += 1
                return self._event(change, seen_at)
            if watch.error is not None:
                raise watch.error
            if watch.ended:
                break
            await changed.wait()
        raise StopAsyncIteration

    def _event(self, change: FileChange, seen_at: float) -> WatchEvent:
        return WatchEvent(
            kind=change.kind,
            path=display_name(change.path),
            is_directory=change.is_directory,
            time=seen_at,
            cursor=self.cursor,
        )

    async def aclose(self) -> None:
        """Close the stream. Safe to repeat."""
        if not self._closed:
            self._closed = True
            self._watch.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _LiveWatch:
    """An observer, the task that reads it, and the history of its last changes."""

    def __init__(self, watches: Watches, options: WatchOptions) -> None:
        self.id = new_id()
        self.options = options
        self.history: deque[tuple[FileChange, float]] = deque(maxlen=MAX_CHANGES)
        self.end = 0
        self.changed = asyncio.Event()
        self.ended = False
        self.error: Exception | None = None
        self.observer = Observer(options, watches.directories)
        self.readers = 0
        self._watches = watches
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def first(self) -> int:
        """Position of the oldest event in the history."""
        return self.end - len(self.history)

    async def start(self, executor: RootExecutor) -> None:
        """Start to watch; changes after the return are recorded."""
        observed = await executor.open(self.observer.run)
        try:
            await observed.next()
        except BaseException:
            await observed.aclose()
            raise
        self._task = asyncio.create_task(self._read(observed))

    async def _read(self, observed: ThreadedGenerator[list[FileChange], None]) -> None:
        try:
            while not self.observer.ended:
                await readable(self.observer.fileno)
                changes = await observed.next()
                if changes:
                    seen_at = time.time()
                    self.history.extend((change, seen_at) for change in changes)
                    self.end += len(changes)
                    self._notify()
                await asyncio.sleep(PAUSE_SECONDS)
        except Exception as error:
            # Raised in the readers of the streams.
            self.error = error
        finally:
            await observed.aclose()
            self.ended = True
            self._watches.forget(self)
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def attach(self) -> None:
        """Count a reader, and cancel the expiry."""
        self.readers += 1
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def detach(self) -> None:
        """Count one reader less, and expire some time after the last."""
        self.readers -= 1
        if not self.readers and not self.ended:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._watches.linger, self._task.cancel)

    async def stop(self, error: SmokeboxError | None = None) -> None:
        """Stop watching; its streams raise `error`, or end."""
        self.error = self.error or error
        if self._expiry is not None:
            self._expiry.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])


class Watches:
    """The watches on one sandbox's files, each with a history that outlives its readers."""

    def __init__(self, executor: RootExecutor, *, linger: float = LINGER_SECONDS) -> None:
        self.linger = linger
        self._executor = executor
        self._by_id: dict[str, _LiveWatch] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def readers(self) -> int:
        """Number of open streams."""
        return sum(watch.readers for watch in self._by_id.values())

    def directories(self) -> int:
        """Return the number of directories that all watches have together."""
        return sum(watch.observer.directories for watch in list(self._by_id.values()))

    async def start(self, options: WatchOptions, cursor: str | None) -> WatchStream:
        """Return a stream of changes from now on, or since `cursor` if its watch still exists."""
        id, position = _parse_cursor(cursor)
        known = self._by_id.get(id)
        if known is not None and known.options == options and position <= known.end:
            return WatchStream(known, position, lost=False)
        await self._make_room()
        watch = _LiveWatch(self, options)
        self._by_id[watch.id] = watch
        try:
            await watch.start(self._executor)
        except BaseException:
            self.forget(watch)
            raise
        return WatchStream(watch, 0, lost=cursor is not None)

    async def _make_room(self) -> None:
        if len(self._by_id) < MAX_WATCHES:
            return
        for watch in self._by_id.values():
            if not watch.readers:
                await watch.stop()
                return
        raise LimitReached(
            f"the sandbox already has {MAX_WATCHES} watches.",
            hint="Close one, or watch a common parent directory.",
            limit=MAX_WATCHES,
        )

    def forget(self, watch: _LiveWatch) -> None:
        """Drop a watch that has ended."""
        self._by_id.pop(watch.id, None)

    async def release(self) -> None:
        """Stop all watches; their streams raise `SandboxGone`."""
        for watch in list(self._by_id.values()):
            await watch.stop(
                SandboxGone(
                    "the sandbox stopped while its files were watched.",
                    hint="Watch again: that starts it.",
                    reason="stopped",
                )
            )


def _parse_cursor(cursor: str | None) -> tuple[str, int]:
    if cursor is None:
        return "", 0
    id, colon, position = cursor.partition(":")
    if not colon or not position.isdecimal() or len(cursor) > 64:
        raise InvalidOption(
            f"not a cursor of a watch: {cursor!r}.",
            hint="Pass the cursor of an event, or omit it.",
            option="cursor",
            value=cursor,
        )
    return id, int(position)
