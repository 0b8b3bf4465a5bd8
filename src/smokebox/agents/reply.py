"""What an agent answers to a prompt, a skill or a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from smokebox.agents.messages import Usage

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """The answer. `str(reply)` is its text.

    `data` is the structured result where `result=` asked for one, else None. `usage` counts
    everything that the work took, its tasks and summaries too. `stopped` says why the work
    ended before the model was done: `budget: turns` (or `tokens`, `cost`, `seconds`),
    `length` for an answer that was cut, `refused` for a model that would not; else None.
    """

    text: str
    data: T
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    stopped: str | None = None

    @property
    def cost(self) -> float | None:
        """US dollars, None where a price is unknown."""
        return self.usage.cost

    def __str__(self) -> str:
        return self.text
