"""Somebody who looks at a terminal."""

from __future__ import annotations

from asyncio import Event
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from smokebox.engine.terminals.output import Output

_MOST = 1 << 16


class View:
    """The output of a terminal as bytes, from `async for` inside of `async with`.

    First comes what the terminal has kept of its output, unless `replay` is False, then what
    is written, until the program has ended and all was given; when the sandbox ended first,
    `SandboxGone` is raised. An open view keeps the sandbox awake.

    Of several viewers the program waits for the quickest. One that is more than the replay
    behind goes on with the oldest bytes that are kept: `lost` counts those it has missed.
    """

    def __init__(
        self,
        output: Output,
        hold: Callable[[], AbstractAsyncContextManager[None]],
        *,
        replay: bool,
    ) -> None:
        self.lost = 0
        self.position = 0
        self.look = Event()
        self._output = output
        self._held = hold()
        self._replay = replay

    async def __aenter__(self) -> Self:
        # Before the sandbox is held: what is written meanwhile is for this viewer too.
        replay = self._output.replay
        self.position = replay.start if self._replay else replay.end
        self._output.join(self)
        try:
            await self._held.__aenter__()
        except BaseException:
            self._output.leave(self)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._output.leave(self)
        return await self._held.__aexit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        replay = self._output.replay
        while self.position == replay.end:
            if self._output.over.is_set():
                if self._output.fault is not None:
                    raise self._output.fault
                raise StopAsyncIteration
            self.look.clear()
            await self.look.wait()
        if self.position < replay.start:
            self.lost += replay.start - self.position
            self.position = replay.start
        data = replay.read(self.position, _MOST)
        self.position += len(data)
        self._output.follow()
        return data
