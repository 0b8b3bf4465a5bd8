"""How much one sandbox may send and get: requests, bytes, and requests in a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.policy import Egress


class Meter:
    """Counts against the bounds of the policy that is in force at the moment.

    A run that ends takes the counts with it. The rate is a bucket of one second.
    """

    def __init__(self, policy: Callable[[], Egress]) -> None:
        self.requests = 0
        self.bytes = 0
        self._policy = policy
        self._left = 1.0
        self._since = time.monotonic()

    def admit(self) -> str:
        """Count a request or a connection; the reason why it is one too many, or nothing."""
        policy = self._policy()
        if policy.max_requests is not None and self.requests >= policy.max_requests:
            return f"max_requests={policy.max_requests} is reached"
        if policy.max_bytes is not None and self.bytes >= policy.max_bytes:
            return f"max_bytes={policy.max_bytes} is reached"
        rate = policy.requests_per_second
        if rate is not None and not self._take(rate):
            return f"more than requests_per_second={rate:g}"
        self.requests += 1
        return ""

    def count(self, size: int) -> str:
        """Count bytes, either way; the reason why they are too many, or nothing."""
        self.bytes += size
        most = self._policy().max_bytes
        return f"max_bytes={most} is reached" if most is not None and self.bytes > most else ""

    def _take(self, rate: float) -> bool:
        at, most = time.monotonic(), max(1.0, rate)
        self._left = min(most, self._left + (at - self._since) * rate)
        self._since = at
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
