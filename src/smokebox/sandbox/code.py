"""Stream of the output and results of code that runs in a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from smokebox.errors import InvalidOption
from smokebox.runtime.stream import ResultStream
from smokebox.types import CodeError, CodeExecution, CodeLanguage, CodeResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

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


class CodeStream(ResultStream[CodeEvent, CodeExecution]):
    """Running code: iterate over its output and results, then read `execution`.

    Leaving early (`break` inside `async with`, `aclose()`, cancellation) interrupts the code.
    """

    def __init__(self, source: AsyncGenerator[CodeEvent | CodeExecution, None]) -> None:
        super().__init__(source, CodeExecution)

    @property
    def execution(self) -> CodeExecution:
        """Outcome of the code, without its output and results; available after the last event."""
        if self._result is None:
            raise RuntimeError("the code has not ended: iterate over its events first")
        return self._result


def check_language(language: object) -> CodeLanguage:
    """Return the language for a name or an alias."""
    found = _LANGUAGES.get(language.lower()) if isinstance(language, str) else None
    if found is None:
        raise InvalidOption(
            f"unknown language {language!r:.80}.",
            hint="Use 'python', 'javascript' or 'typescript'.",
            option="language",
            value=language,
        )
    return found
