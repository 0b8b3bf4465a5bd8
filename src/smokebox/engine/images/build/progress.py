"""Progress of a build: numbered steps, their output, and the end of it for errors."""

from __future__ import annotations

import asyncio
import codecs
import time
from typing import TYPE_CHECKING

from smokebox.wire.builds import BuildEvent

if TYPE_CHECKING:
    from smokebox.engine.images.build.instructions import Instruction
    from smokebox.runtime.stream import Chunk

TAIL = 4000
# A build waits for its reader once so many events are waiting.
MAX_WAITING = 256


class Progress:
    """The events of one build, in a bounded queue that its reader drains."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.queue: asyncio.Queue[BuildEvent] = asyncio.Queue(MAX_WAITING)

    async def warn(self, text: str, *, stage: str = "", line: int = 0) -> None:
        """Report something that does not end the build."""
        await self.queue.put(BuildEvent(kind="warning", stage=stage, line=line, data=text))

    async def send(self, event: BuildEvent) -> None:
        """Send an event."""
        await self.queue.put(event)


class StepProgress:
    """The events of one step. `tail` is the end of its output."""

    def __init__(
        self, progress: Progress, *, number: int, stage: str, instruction: Instruction
    ) -> None:
        self._progress = progress
        self._number = number
        self._stage = stage
        self._instruction = instruction
        self._started = time.monotonic()
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
        }
        self.tail = ""

    async def begin(self) -> None:
        """Report that the step starts."""
        self._started = time.monotonic()
        await self._progress.send(self._event("step"))

    async def end(self, *, cached: bool) -> None:
        """Report that the step is done."""
        seconds = time.monotonic() - self._started
        await self._progress.send(self._event("done", cached=cached, seconds=seconds))

    async def write(self, chunk: Chunk) -> None:
        """Report output."""
        text = self._decoders[chunk.stream].decode(chunk.data)
        if text:
            self.tail = (self.tail + text)[-TAIL:]
            await self._progress.send(self._event("output", stream=chunk.stream, data=text))

    async def warn(self, text: str) -> None:
        """Report something that does not end the build."""
        await self._progress.warn(text, stage=self._stage, line=self._instruction.line)

    def _event(self, kind: str, **fields: object) -> BuildEvent:
        return BuildEvent(
            kind=kind,  # type: ignore[arg-type]
            step=self._number,
            steps=self._progress.steps,
            stage=self._stage,
            instruction=self._instruction.text,
            line=self._instruction.line,
            **fields,  # type: ignore[arg-type]
        )
