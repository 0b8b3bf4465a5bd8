"""Something that runs: what it gives as it comes, and how it ended once that is known."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar, cast

from smokebox.types import ExecResult, OutputChunk, Stream

if TYPE_CHECKING:
    from types import TracebackType

Piece = TypeVar("Piece")
End = TypeVar("End")


class Chunk(NamedTuple):
    """Bytes as they came out of one pipe."""

    stream: Stream
    data: bytes


class ResultStream(AsyncIterator[Piece], Generic[Piece, End]):
    """Iterate for its pieces. The last item of `source`, of the kind `end`, is its end.

    Leaving early (`break` inside `async with`, `aclose()`, cancellation) closes the source.
    """

    def __init__(self, source: AsyncGenerator[Piece | End, None], end: type[End]) -> None:
        self._source = source
        self._kind = end
        self._end: End | None = None

    async def __anext__(self) -> Piece:
        item = await self._source.__anext__()
        if not isinstance(item, self._kind):
            return cast("Piece", item)
        self._end = item
        await self._source.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End it if it still runs."""
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


class RunningCommand(ResultStream[Piece, ExecResult]):
    """A running command: iterate for its output, then read `result`.

    Leaving early (`break` inside `async with`, `aclose()`, cancellation) kills the command.
    """

    def __init__(self, source: AsyncGenerator[Piece | ExecResult, None]) -> None:
        super().__init__(source, ExecResult)

    @property
    def result(self) -> ExecResult:
        """How the command ended, without its output; known after the last chunk."""
        if self._end is None:
            raise RuntimeError("the command has not ended: iterate over its output first")
        return self._end

    @property
    def exit_code(self) -> int:
        """Short for `result.exit_code`."""
        return self.result.exit_code


class ExecStream(RunningCommand[OutputChunk]):
    """A running command whose output is text, in pieces never cut inside a character."""


class ByteStream(RunningCommand[Chunk]):
    """A running command whose output is the bytes that it writes, in pieces as they come."""
