"""Rate limits of each principal: requests per second, and concurrent requests."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.server.settings import ServerSettings
    from smokebox.server.tenancy.principal import Principal

# Above this number, inactive principals are removed.
_MANY_PRINCIPALS = 1024


@dataclass(slots=True)
class ClientUsage:
    """The tokens that one principal has left, and the number of its running requests."""

    tokens: float
    filled_at: float
    running: int = 0


class RateLimiter:
    """A token bucket and a counter for each principal. Streams and WebSockets count too.

    A bucket holds the tokens of one second, which is the largest burst.
    """

    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = settings.rate
        self._burst = max(1.0, settings.rate or 0.0)
        self._concurrency = settings.concurrency
        self._socket_too = settings.limit_socket
        self._clock = clock
        self._usage: dict[str, ClientUsage] = {}

    def acquire(self, principal: Principal, *, by_socket: bool) -> ClientUsage | None:
        """Count the start of a request; None if it has no limits. Raises `LimitReached`.

        The caller subtracts the request from `running` at its end.
        """
        if (self._rate is None and self._concurrency is None) or (
            by_socket and not self._socket_too
        ):
            return None
        usage = self._usage_of(principal.id)
        if self._concurrency is not None and usage.running >= self._concurrency:
            raise LimitReached(
                f"this key already has {self._concurrency} running requests, which is its limit.",
                hint="Wait for one of them to end; streams and terminals count too.",
                limit=self._concurrency,
                retry_after=1.0,
            )
        self._take_token(usage)
        usage.running += 1
        return usage

    def _usage_of(self, id: str) -> ClientUsage:
        usage = self._usage.get(id)
        if usage is None:
            if len(self._usage) >= _MANY_PRINCIPALS:
                self._remove_inactive()
            usage = self._usage[id] = ClientUsage(self._burst, self._clock())
        return usage

    def _take_token(self, usage: ClientUsage) -> None:
        if self._rate is None:
            return
        now = self._clock()
        earned = (now - usage.filled_at) * self._rate
        usage.tokens = min(self._burst, usage.tokens + earned)
        usage.filled_at = now
        if usage.tokens < 1.0:
            wait = (1.0 - usage.tokens) / self._rate
            raise LimitReached(
                f"this key has sent more than {self._rate:g} requests a second.",
                hint=f"Wait {wait:.2g} s before the next request.",
                limit=self._rate,
                retry_after=math.ceil(wait * 1000) / 1000,
            )
        usage.tokens -= 1.0

    def _remove_inactive(self) -> None:
        """Remove principals that were inactive until their bucket was full again."""
        full = self._clock() - self._burst / (self._rate or 1.0)
        self._usage = {
            id: usage
            for id, usage in self._usage.items()
            if usage.running or usage.filled_at > full
        }
