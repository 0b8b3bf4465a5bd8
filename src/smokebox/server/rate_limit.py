"""Rate limits of each principal: requests per second, and concurrent requests."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.server.keys import Principal
    from smokebox.server.settings import ServerSettings

# Above this number, accounts of inactive principals are removed.
_MANY_ACCOUNTS = 1024


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
        self._most = settings.concurrency
        self._socket_too = settings.limit_socket
        self._clock = clock
        self._accounts: dict[str, ClientUsage] = {}

    def enter(self, principal: Principal, *, by_socket: bool) -> ClientUsage | None:
        """Begin a request. Pass the returned account to `leave`. Raises `LimitReached`."""
        if (self._rate is None and self._most is None) or (by_socket and not self._socket_too):
            return None
        account = self._account(principal.id)
        if self._most is not None and account.running >= self._most:
            raise LimitReached(
                f"this key already has {self._most} running requests, which is its limit.",
                hint="Wait for one of them to end; streams and terminals count too.",
                limit=self._most,
                retry_after=1.0,
            )
        self._take(account)
        account.running += 1
        return account

    def leave(self, account: ClientUsage) -> None:
        """End a request."""
        account.running -= 1

    def _account(self, id: str) -> ClientUsage:
        account = self._accounts.get(id)
        if account is None:
            if len(self._accounts) >= _MANY_ACCOUNTS:
                self._forget()
            account = self._accounts[id] = ClientUsage(self._burst, self._clock())
        return account

    def _take(self, account: ClientUsage) -> None:
        if self._rate is None:
            return
        now = self._clock()
        earned = (now - account.filled_at) * self._rate
        account.tokens = min(self._burst, account.tokens + earned)
        account.filled_at = now
        if account.tokens < 1.0:
            wait = (1.0 - account.tokens) / self._rate
            raise LimitReached(
                f"this key has sent more than {self._rate:g} requests a second.",
                hint=f"Wait {wait:.2g} s before the next request.",
                limit=self._rate,
                retry_after=math.ceil(wait * 1000) / 1000,
            )
        account.tokens -= 1.0

    def _forget(self) -> None:
        """Remove principals that were inactive until their bucket was full again."""
        full = self._clock() - self._burst / (self._rate or 1.0)
        self._accounts = {
            id: one for id, one in self._accounts.items() if one.running or one.filled_at > full
        }
