"""Rate limits of each principal: requests per second, and concurrent requests."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.tenancy.principal import Principal

# Above this number, inactive principals are removed.
_MANY_PRINCIPALS = 1024


@dataclass(slots=True)
class ClientUsage:
    """The tokens that one principal has left, and the number of its running requests."""

    tokens: float
    filled_at: float
    rate: float | None
    running: int = 0

    def end(self) -> None:
        """Count the end of a request."""
        self.running -= 1

    def full(self, now: float) -> bool:
        """Return true if the bucket is full again by the time `now`."""
        seconds = max(1.0, self.rate or 0.0) / (self.rate or 1.0)
        return self.filled_at <= now - seconds


class RateLimiter:
    """A token bucket and a counter for each principal. Streams and WebSockets count too.

    A bucket holds the tokens of one second, which is the largest burst. `rate` and `concurrency`
    are for principals whose profile has none, and `socket_too` limits the unix socket as well.
    """

    def __init__(
        self,
        *,
        rate: float | None = None,
        concurrency: int | None = None,
        socket_too: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._concurrency = concurrency
        self._socket_too = socket_too
        self._clock = clock
        self._usage: dict[str, ClientUsage] = {}

    def acquire(self, principal: Principal, *, by_socket: bool) -> ClientUsage | None:
        """Count the start of a request; None if it has no limits. Raises `LimitReached`.

        The caller calls `end` of the usage when the request ends.
        """
        rate, concurrency, raised_by = self._rate, self._concurrency, "--{} of `smokebox serve`"
        if (profile := principal.profile) is not None:
            if profile.rate is not None:
                rate = profile.rate
            if profile.concurrency is not None:
                concurrency = profile.concurrency
            raised_by = profile.setting("{}")
        if (rate is None and concurrency is None) or (by_socket and not self._socket_too):
            return None
        usage = self._usage_of(principal.id, rate)
        if concurrency is not None and usage.running >= concurrency:
            raise LimitReached(
                f"this key already has {concurrency} running requests, which is its limit.",
                hint="Wait for one of them to end; streams and terminals count too. The operator "
                f"raises the limit with {raised_by.format('concurrency')}.",
                limit=concurrency,
                retry_after=1.0,
                key=principal.id,
                ceiling="concurrency",
            )
        if rate is not None and (wait := self._take_token(usage, rate)):
            raise LimitReached(
                f"this key has sent more than {rate:g} requests a second.",
                hint=f"Wait {wait:.2g} s before the next request. The operator raises the limit "
                f"with {raised_by.format('rate')}.",
                limit=rate,
                retry_after=math.ceil(wait * 1000) / 1000,
                key=principal.id,
                ceiling="rate",
            )
        usage.running += 1
        return usage

    def _usage_of(self, id: str, rate: float | None) -> ClientUsage:
        usage = self._usage.get(id)
        if usage is None:
            if len(self._usage) >= _MANY_PRINCIPALS:
                self._remove_inactive()
            usage = self._usage[id] = ClientUsage(max(1.0, rate or 0.0), self._clock(), rate)
        return usage

    def _take_token(self, usage: ClientUsage, rate: float) -> float:
        """Take a token, or return the seconds until there is one."""
        now = self._clock()
        earned = (now - usage.filled_at) * rate
        usage.tokens = min(max(1.0, rate), usage.tokens + earned)
        usage.filled_at = now
        if usage.tokens < 1.0:
            return (1.0 - usage.tokens) / rate
        usage.tokens -= 1.0
        return 0.0

    def _remove_inactive(self) -> None:
        """Remove principals that were inactive until their bucket was full again."""
        now = self._clock()
        self._usage = {
            id: usage for id, usage in self._usage.items() if usage.running or not usage.full(now)
        }
