"""Code that runs in a context, as a stream of what it writes and shows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Self, TypeAlias

from smokebox.errors import InvalidOption
from smokebox.types import CodeError, CodeExecution, CodeLanguage, CodeResult, OutputChunk

if TYPE_CHECKING:
    from types import TracebackType

CodeEvent: TypeAlias = OutputChunk | CodeResult | CodeError

_LANGUAGES: dict[str, CodeLanguage] = {
    "python": "python",
    "python3": "python",
    "py": "python",
    "javascript": "javascript",
    "js": "javascript",
    "node": "javascript",
    "typescript": "typescript",
    "ts": "typescript",
}


class CodeStream(AsyncIterator[CodeEvent]):
    """Running code: iterate for what it writes and shows, then read `execution`.

    Leaving early (`break` inside `async with`, `aclose()`, cancellation) interrupts the code.
    """

    def __init__(self, source: AsyncGenerator[CodeEvent | CodeExecution, None]) -> None:
        self._source = source
        self._execution: CodeExecution | None = None

    @property
    def execution(self) -> CodeExecution:
        """How the code ended, without its output and results; known after the last event."""
        if self._execution is None:
            raise RuntimeError("the code has not ended: iterate over its events first")
        return self._execution

    async def __anext__(self) -> CodeEvent:
        item = await self._source.__anext__()
        if not isinstance(item, CodeExecution):
            return item
        self._execution = item
        await self._source.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Interrupt the code if it still runs."""
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


def check_language(language: object) -> CodeLanguage:
    """The language of that name, or of one of its other names."""
    found = _LANGUAGES.get(language.lower()) if isinstance(language, str) else None
    if found is None:
        raise InvalidOption(
            f"there are no contexts for the language {language!r:.80}.",
            hint="Use 'python', 'javascript' or 'typescript'.",
            option="language",
            value=language,
        )
    return found
