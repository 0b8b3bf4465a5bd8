"""How much each principal may ask: requests a second, and requests at a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.server.principal import Principal
    from smokebox.server.settings import Settings

# From here on accounts of those who do not ask any more are looked for.
_MANY_ACCOUNTS = 1024


@dataclass(slots=True)
class Account:
    """What one principal has left of its rate, and how many of its requests are running."""

    tokens: float
    filled_at: float
    running: int = 0


class Limits:
    """A bucket of tokens for each principal, and a count. Streams and WebSockets count.

    A bucket holds what a second gives, so as much may come at once.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = settings.rate
        self._burst = max(1.0, settings.rate or 0.0)
        self._most = settings.concurrency
        self._socket_too = settings.limit_socket
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def enter(self, principal: Principal, *, by_socket: bool) -> Account | None:
        """Begin a request; who gets an account gives it back. Raises `LimitReached`."""
        if (self._rate is None and self._most is None) or (by_socket and not self._socket_too):
            return None
        account = self._account(principal.id)
        if self._most is not None and account.running >= self._most:
            raise LimitReached(
                f"{self._most} requests of this key are running, which is as many as may.",
                hint="Wait for one of them to end; streams and terminals count too.",
                limit=self._most,
                retry_after=1.0,
            )
        self._take(account)
        account.running += 1
        return account

    def leave(self, account: Account) -> None:
        """End a request."""
        account.running -= 1

    def _account(self, id: str) -> Account:
        account = self._accounts.get(id)
        if account is None:
            if len(self._accounts) >= _MANY_ACCOUNTS:
                self._forget()
            account = self._accounts[id] = Account(self._burst, self._clock())
        return account

    def _take(self, account: Account) -> None:
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
                hint=f"Wait {wait:.2g} s before the next.",
                limit=self._rate,
                retry_after=math.ceil(wait * 1000) / 1000,
            )
        account.tokens -= 1.0

    def _forget(self) -> None:
        """Forget who has not asked for so long that its bucket is full again."""
        full = self._clock() - self._burst / (self._rate or 1.0)
        self._accounts = {
            id: one for id, one in self._accounts.items() if one.running or one.filled_at > full
        }
