"""Something that runs: what it gives as it comes, and how it ended once that is known."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

if TYPE_CHECKING:
    from types import TracebackType

Piece = TypeVar("Piece")
End = TypeVar("End")


class Running(AsyncIterator[Piece], Generic[Piece, End]):
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
