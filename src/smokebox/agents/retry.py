"""When to make a failed request again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.agents.durability import Durability
    from smokebox.errors import ModelError

# A provider that wants us to wait for longer is as good as one that is not there.
LONGEST_DELAY = 120.0


def delay_before(attempt: int, error: ModelError, durability: Durability) -> float | None:
    """Seconds to wait before the `attempt`-th repetition, or None where there is none to be.

    Jittered, so that many agents which one outage stopped do not come back all at once.
    """
    if not error.retryable or attempt > durability.retries:
        return None
    told = error.fields.get("retry_after")
    if isinstance(told, (int, float)):
        return float(told) if told <= LONGEST_DELAY else None
    delay: float = durability.retry_delay * 2 ** (attempt - 1)
    return min(delay, LONGEST_DELAY) * random.uniform(0.75, 1.0)
