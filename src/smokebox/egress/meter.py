"""Traffic limits of one sandbox: requests, bytes, and requests per second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.policy import Egress


class Meter:
    """Counts the traffic of one run against the limits of the current policy.

    The rate is a token bucket that holds the tokens of one second.
    """

    def __init__(self, policy: Callable[[], Egress]) -> None:
        self.requests = 0
        self.bytes = 0
        self._policy = policy
        self._tokens = 1.0
        self._filled_at = time.monotonic()

    def admit(self) -> str:
        """Count a request or connection; return the reason to refuse it, or nothing."""
        policy = self._policy()
        if policy.max_requests is not None and self.requests >= policy.max_requests:
            return f"max_requests={policy.max_requests} is reached"
        if policy.max_bytes is not None and self.bytes >= policy.max_bytes:
            return f"max_bytes={policy.max_bytes} is reached"
        rate = policy.requests_per_second
        if rate is not None and not self._take_token(rate):
            return f"more than requests_per_second={rate:g}"
        self.requests += 1
        return ""

    def count(self, size: int) -> str:
        """Count bytes, sent or received; return the reason to stop, or nothing."""
        self.bytes += size
        limit = self._policy().max_bytes
        return f"max_bytes={limit} is reached" if limit is not None and self.bytes > limit else ""

    def _take_token(self, rate: float) -> bool:
        now, capacity = time.monotonic(), max(1.0, rate)
        self._tokens = min(capacity, self._tokens + (now - self._filled_at) * rate)
        self._filled_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
