"""The watches of a sandbox: what changed, as streams that can be left and taken up again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple, Self

from smokebox.engine.files.observer import MAX_CHANGES, FileChange, Observer
from smokebox.errors import InvalidOption, LimitReached, SandboxGone, SmokeboxError
from smokebox.foundation.ids import new_id
from smokebox.runtime.pipes import readable
from smokebox.sandbox.hostfiles import shown
from smokebox.types import WatchEvent

if TYPE_CHECKING:
    from smokebox.engine.files.executor import RootExecutor, SteppedWork

EXCLUDED = (".git", "node_modules", ".DS_Store")
LINGER = 60.0
MAX_WATCHES = 8
# Between two looks, so that a burst is read at once and a flood does not take a whole core.
PAUSE = 0.01


class WatchOptions(NamedTuple):
    """What a watch looks at."""

    path: str
    recursive: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]


class WatchStream(AsyncIterator[WatchEvent]):
    """The events of a watch, from the moment it was made or from a cursor on.

    It ends when what is watched is removed or moved away. Leaving it keeps its journal for
    a while, in which `watch(cursor=...)` takes it up again. A reader that falls far behind
    gets one `resync` for what it missed.
    """

    def __init__(self, watch: _Watch, position: int, *, lost: bool) -> None:
        self._watch = watch
        self._position = position
        self._lost = lost
        self._closed = False
        watch.attach()

    @property
    def cursor(self) -> str:
        """Where this stream is: a later watch with it misses nothing after the last event."""
        return f"{self._watch.name}:{self._position}"

    async def __anext__(self) -> WatchEvent:
        while not self._closed:
            news = self._watch.news
            if self._lost or self._position < self._watch.first:
                self._lost = False
                self._position = self._watch.end
                return self._event(
                    FileChange("resync", self._watch.options.path, True), time.time()
                )
            if self._position < self._watch.end:
                noted = self._watch.journal[self._position - self._watch.first]
                self._position += 1
                return self._event(noted.change, noted.time)
            if self._watch.error is not None:
                raise self._watch.error
            if self._watch.ended:
                break
            await news.wait()
        raise StopAsyncIteration

    def _event(self, change: FileChange, moment: float) -> WatchEvent:
        return WatchEvent(
            kind=change.kind,
            path=shown(change.path),
            is_directory=change.is_directory,
            time=moment,
            cursor=self.cursor,
        )

    async def aclose(self) -> None:
        """Leave the stream. Safe to repeat."""
        if not self._closed:
            self._closed = True
            self._watch.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Noted(NamedTuple):
    change: FileChange
    time: float


class _Watch:
    """An observer, the task that asks it, and a journal of the last that it told."""

    def __init__(self, watches: Watches, options: WatchOptions) -> None:
        self.name = new_id()
        self.options = options
        self.journal: deque[_Noted] = deque(maxlen=MAX_CHANGES)
        self.end = 0
        self.news = asyncio.Event()
        self.ended = False
        self.error: Exception | None = None
        self.observer = Observer(
            options.path,
            recursive=options.recursive,
            include=options.include,
            exclude=options.exclude,
            count=watches.directories,
        )
        self.readers = 0
        self._watches = watches
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def first(self) -> int:
        """The position of the oldest event in the journal."""
        return self.end - len(self.journal)

    async def start(self, desk: RootExecutor) -> None:
        """Begin to watch; what happens from here on is told."""
        steps = await desk.open(self.observer.run)
        try:
            await steps.next()
        except BaseException:
            await steps.aclose()
            raise
        self._task = asyncio.create_task(self._pump(steps))

    async def _pump(self, steps: SteppedWork[list[FileChange], None]) -> None:
        try:
            while not self.observer.ended:
                await readable(self.observer.fileno)
                changes = await steps.next()
                self._note(changes or [])
                await asyncio.sleep(PAUSE)
        except Exception as error:
            # Whoever reads the stream gets it.
            self.error = error
        finally:
            await steps.aclose()
            self._finish()

    def _note(self, changes: list[FileChange]) -> None:
        moment = time.time()
        for change in changes:
            self.journal.append(_Noted(change, moment))
            self.end += 1
        if changes:
            self._wake()

    def _finish(self) -> None:
        self.ended = True
        self._watches.forget(self)
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def attach(self) -> None:
        """Count a reader, and stay for it."""
        self.readers += 1
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def detach(self) -> None:
        """Count one reader less, and go a while after the last."""
        self.readers -= 1
        if not self.readers and not self.ended:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._watches.linger, self._task.cancel)

    async def stop(self, error: SmokeboxError | None = None) -> None:
        """Watch no longer; readers get `error`, or come to an end."""
        self.error = self.error or error
        if self._expiry is not None:
            self._expiry.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])


class Watches:
    """The watches on one sandbox's files, each with a journal that outlives its readers."""

    def __init__(self, desk: RootExecutor, *, linger: float = LINGER) -> None:
        self.linger = linger
        self._desk = desk
        self._by_name: dict[str, _Watch] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def readers(self) -> int:
        """How many streams are open."""
        return sum(watch.readers for watch in self._by_name.values())

    def directories(self) -> int:
        """How many directories are watched, by all of them."""
        return sum(watch.observer.directories for watch in list(self._by_name.values()))

    async def start(
        self,
        path: str,
        *,
        recursive: bool,
        include: tuple[str, ...],
        exclude: tuple[str, ...],
        cursor: str | None,
    ) -> WatchStream:
        """A stream of what happens from here on, or since `cursor` where that is known."""
        options = WatchOptions(path, recursive, include, exclude)
        name, position = _parse(cursor)
        known = self._by_name.get(name)
        if known is not None and known.options == options and position <= known.end:
            return WatchStream(known, position, lost=False)
        await self._make_room()
        watch = _Watch(self, options)
        self._by_name[watch.name] = watch
        try:
            await watch.start(self._desk)
        except BaseException:
            self.forget(watch)
            raise
        return WatchStream(watch, 0, lost=cursor is not None)

    async def _make_room(self) -> None:
        if len(self._by_name) < MAX_WATCHES:
            return
        for watch in self._by_name.values():
            if not watch.readers:
                await watch.stop()
                return
        raise LimitReached(
            f"the sandbox has {MAX_WATCHES} watches already.",
            hint="Close one, or watch a directory above both.",
            limit=MAX_WATCHES,
        )

    def forget(self, watch: _Watch) -> None:
        """Drop a watch that has ended."""
        self._by_name.pop(watch.name, None)

    async def release(self) -> None:
        """End all watches; readers get `SandboxGone`."""
        for watch in list(self._by_name.values()):
            await watch.stop(
                SandboxGone(
                    "the sandbox stopped while its files were watched.",
                    hint="Watch again: that starts it.",
                    reason="stopped",
                )
            )


def _parse(cursor: str | None) -> tuple[str, int]:
    if cursor is None:
        return "", 0
    name, colon, position = cursor.partition(":")
    if not colon or not position.isdecimal() or len(cursor) > 64:
        raise InvalidOption(
            f"not a cursor of a watch: {cursor!r}.",
            hint="Pass the cursor of an event, or leave it out.",
            option="cursor",
            value=cursor,
        )
    return name, int(position)
