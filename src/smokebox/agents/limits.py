"""Limits of a work item: its budget, its retries and its deadlines."""

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
    """Limits of one work item, its tasks included; None means no limit.

    `turns` counts requests to models, `tokens` those read and written, `cost` US dollars and
    `seconds` the elapsed time. Work that reaches a limit ends with the text it has: it is
    `completed`, and `Reply.stopped` names the limit. The first three are checked before each
    request, so the last request may exceed them; `seconds` interrupts a running request.
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
                    f"budget: {field.name} must be a number above 0 or None, not {value!r}.",
                    hint=f"Pass for example Budget({field.name}=100).",
                    option=field.name,
                    value=value,
                )


class UsageMeter:
    """Counts the usage of a work item against its budget, and against its parent's."""

    def __init__(self, budget: Budget | None, parent: UsageMeter | None = None) -> None:
        self._budget = budget or Budget()
        self._parent = parent
        self._began = time.monotonic()
        self.usage = Usage()
        self.turns = 0

    def add(self, usage: Usage, *, turns: int = 0) -> None:
        """Count the usage of a request."""
        self.usage += usage
        self.turns += turns
        if self._parent is not None:
            self._parent.add(usage, turns=turns)

    def exceeded(self) -> str | None:
        """Return the limit that forbids another request, as in `Reply.stopped`, or None."""
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
        """Seconds until the time limit; infinite without one."""
        left = math.inf
        if self._budget.seconds is not None:
            left = self._budget.seconds - (time.monotonic() - self._began)
        return left if self._parent is None else min(left, self._parent.seconds_left)


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """Retries and deadlines of work.

    Work is started at most `max_attempts` times: it restarts each time that its process was
    killed. It fails once `timeout` seconds have passed since it was accepted. A request that
    failed with a temporary error is retried up to `retries` times, after about `retry_delay`
    seconds, doubled each time, or after the delay that the provider names. A model that sends
    nothing for `stall` seconds counts as such an error.
    """

    max_attempts: int = 10
    timeout: float = 3600.0
    retries: int = 3
    retry_delay: float = 2.0
    stall: float = 180.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name in ("max_attempts", "retries")
            least = 0 if field.name in ("retries", "retry_delay") else 1e-9
            right = isinstance(value, int if whole else (int, float))
            if isinstance(value, bool) or not right or not value >= least:
                kind = "a whole number" if whole else "a number of seconds"
                raise InvalidOption(
                    f"durability: {field.name} must be {kind}, not {value!r}.",
                    hint=f"Leave it out for {field.default!r}.",
                    option=field.name,
                    value=value,
                )
