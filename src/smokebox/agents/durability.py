"""How hard accepted work is held on to: through failing models, and through killed processes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from smokebox.errors import InvalidOption
from smokebox.options import strict_fields


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """When to try again, and when to let go.

    Work is begun at most `max_attempts` times, again each time that its process was killed,
    and ends as failed once `timeout` seconds have passed since it was accepted. A request
    that failed for a reason that may pass is made again up to `retries` times, after about
    `retry_delay` seconds and then twice that each time, or when the provider says. A model
    that sends nothing for `stall` seconds counts as such a failure.
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
                    f"durability: {field.name} is {kind}, not {value!r}.",
                    hint=f"Leave it out for {field.default!r}.",
                    option=field.name,
                    value=value,
                )
