"""Streams of a running command: its output as it is written, then its result."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar, cast

from smokebox.types import ExecResult, OutputChunk, Stream

if TYPE_CHECKING:
    from types import TracebackType

Item = TypeVar("Item")
Result = TypeVar("Result")


class Chunk(NamedTuple):
    """Bytes that were read from one pipe."""

    stream: Stream
    data: bytes


class ResultStream(AsyncIterator[Item], Generic[Item, Result]):
    """Iterates over `source`, whose last item is the result and has the type `result`.

    Leaving early (`break` inside `async with`, `aclose()`, cancellation) closes the source.
    """

    def __init__(self, source: AsyncGenerator[Item | Result, None], result: type[Result]) -> None:
        self._source = source
        self._result_type = result
        self._result: Result | None = None

    async def __anext__(self) -> Item:
        item = await self._source.__anext__()
        if not isinstance(item, self._result_type):
            return cast("Item", item)
        self._result = item
        await self._source.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the source."""
        await self._source.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class RunningCommand(ResultStream[Item, ExecResult]):
    """A running command. Iterate over its output, then read `result`.

    Leaving early (`break` inside `async with`, `aclose()`, cancellation) kills the command.
    """

    def __init__(self, source: AsyncGenerator[Item | ExecResult, None]) -> None:
        super().__init__(source, ExecResult)

    @property
    def result(self) -> ExecResult:
        """Result of the command without its output, known after the last chunk."""
        if self._result is None:
            raise RuntimeError("the command is still running: iterate over its output first")
        return self._result

    @property
    def exit_code(self) -> int:
        """Short for `result.exit_code`."""
        return self.result.exit_code


class ExecStream(RunningCommand[OutputChunk]):
    """A running command whose output is text. Chunks never split a character."""


class ByteStream(RunningCommand[Chunk]):
    """A running command whose output is bytes, as it writes them."""
