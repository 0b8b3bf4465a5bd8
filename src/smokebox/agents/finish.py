"""How the loop can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smokebox.errors import ResultUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What was said last, and by which model. `result` is `data` as it goes into the record."""

    text: str
    model: str
    data: Any = None
    result: Any = None
    stopped: str | None = None


def unavailable(reason: str, text: str) -> ResultUnavailable:
    """The error of work that was to give a result."""
    return ResultUnavailable(
        f"there is no result: {reason}.",
        hint="What the model said instead is in `text`.",
        reason=reason,
        text=text,
    )
