"""What a piece of work may take, and what it has taken."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields

from smokebox.agents.messages import Usage
from smokebox.errors import InvalidOption
from smokebox.options import strict_fields


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one piece of work, its tasks included; None is no limit.

    `turns` counts requests to models, `tokens` those read and written, `cost` US dollars and
    `seconds` the time. Work that reaches one ends with what there is: it is `completed`, and
    `Reply.stopped` names the limit. The first three are looked at before each request, so
    that the last one may go beyond; time is up in the middle of whatever goes on.
    """

    turns: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise InvalidOption(
                    f"budget: {field.name} is a number above 0 or None, not {value!r}.",
                    hint=f"Pass for example Budget({field.name}=100).",
                    option=field.name,
                    value=value,
                )


class Meter:
    """Counts what work takes against its budget, and against that of whose task it does."""

    def __init__(self, budget: Budget | None, parent: Meter | None = None) -> None:
        self._budget = budget or Budget()
        self._parent = parent
        self._began = time.monotonic()
        self.usage = Usage()
        self.turns = 0

    def add(self, usage: Usage, *, turns: int = 0) -> None:
        """Count what a request took."""
        self.usage += usage
        self.turns += turns
        if self._parent is not None:
            self._parent.add(usage, turns=turns)

    def exceeded(self) -> str | None:
        """The limit that does not allow another request, as `Reply.stopped` names it."""
        limits, used = self._budget, self.usage
        if limits.turns is not None and self.turns >= limits.turns:
            return "budget: turns"
        if limits.tokens is not None and used.total_tokens >= limits.tokens:
            return "budget: tokens"
        if limits.cost is not None and (used.cost or 0.0) >= limits.cost:
            return "budget: cost"
        if self.seconds_left <= 0:
            return "budget: seconds"
        return self._parent.exceeded() if self._parent is not None else None

    @property
    def seconds_left(self) -> float:
        """How much time there is; infinite where it is not limited."""
        left = math.inf
        if self._budget.seconds is not None:
            left = self._budget.seconds - (time.monotonic() - self._began)
        return left if self._parent is None else min(left, self._parent.seconds_left)
