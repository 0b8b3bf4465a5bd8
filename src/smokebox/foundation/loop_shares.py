"""Shares of an event loop: a tenant that keeps it busy waits for those that seldom need it.

An event loop runs every step that is ready, and so a tenant with a hundred connections gets a
hundred times the time of one with a single request. Here the steps of each tenant's tasks are
measured. Where several tenants use the loop, those that use most of it wait before they start more
work (before a request, or the next piece of a body) until the others are idle, or until they may
use their part of the time anyway. Nothing waits in the middle of work, where it may hold a lock.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")

# Part of the time that tenants have together before some of them wait for the others.
TARGET = 0.25
# Others are idle after so long without a step.
_IDLE_SECONDS = 0.002
_TICK_SECONDS = 0.005
# The usage of a tenant is an average over about so long.
_AVERAGE_SECONDS = 1.0
# A tenant that used more than its share pays back at most so much.
_LARGEST_DEBT = 0.03
# A smaller part of the time is no use of the loop.
_NOTHING = 0.0005
# After so long without a request of the operator, a single tenant has the loop for itself.
_ALONE_SECONDS = 1.0


class LoopShare:
    """The time that one tenant uses, and its work that waits.

    `rate` is the part of the time that it used lately, and `credit` the seconds that it may use
    until the next tick if it is `limited`. Its long work in threads takes turns by `thread_turn`.
    """

    __slots__ = (
        "__weakref__",
        "_shares",
        "active",
        "credit",
        "limited",
        "rate",
        "tenant",
        "thread_turn",
        "used",
        "waiting",
    )

    def __init__(self, shares: LoopShares, tenant: str) -> None:
        self.tenant = tenant
        self.active = False
        self.used = 0.0
        self.rate = 0.0
        self.credit = 0.0
        self.limited = False
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.thread_turn = threading.Lock()
        self._shares = shares

    @property
    def used_up(self) -> bool:
        """True if no work may start before the next tick, unless others become idle."""
        return self.limited and self.used >= self.credit and self._shares.are_busy()

    @property
    def has_others(self) -> bool:
        """True if others than the tenant used the event loop lately. Safe from any thread."""
        return self._shares.has_others(self)

    async def turn(self) -> None:
        """Wait until more work may start."""
        if self.waiting or self.used_up:
            turn = self._shares.loop.create_future()
            self.waiting.append(turn)
            if not self.active:
                self._shares.activate(self)
            await turn

    def charge(self, seconds: float) -> None:
        """Count time that work of the tenant took."""
        self.used += seconds
        if not self.limited:
            self._shares.used_at = time.perf_counter()
        if not self.active:
            self._shares.activate(self)

    def run(self, work: Callable[[], T]) -> T:
        """Call `work`, and count its time."""
        started = time.perf_counter()
        try:
            return work()
        finally:
            self.charge(time.perf_counter() - started)


# The share that the work of this context uses; None for the operator, and for the server itself.
_current: ContextVar[LoopShare | None] = ContextVar("loop_share", default=None)


def current_share() -> LoopShare | None:
    """Return the share that the work of this context uses."""
    return _current.get()


def current_tenant() -> str:
    """Return the tenant that the work of this context is done for, or ""."""
    share = _current.get()
    return "" if share is None else share.tenant


async def pause() -> None:
    """Wait until the tenant of this context may start more work."""
    if (share := _current.get()) is not None and (share.waiting or share.used_up):
        await share.turn()


def create_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Future[Any]:
    """Create a task whose steps are measured if it works for a tenant; a task factory."""
    if (share := _current.get()) is not None:
        work = _Metered(share, work)
    return asyncio.Task(work, loop=loop, **options)


async def run_in(share: LoopShare | None, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as work of a tenant, once there is time for it.

    What it starts as tasks is measured too.
    """
    _current.set(share)
    if share is None:
        return await work
    try:
        await share.turn()
    except BaseException:
        work.close()
        raise
    return await _Metered(share, work)


class LoopShares:
    """The shares of one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._shares: WeakValueDictionary[str, LoopShare] = WeakValueDictionary()
        self._active: list[LoopShare] = []
        self._ticked = 0.0
        self._next: asyncio.Handle | None = None
        self._others_at = -math.inf
        # When a tenant that is not limited, or the operator, has used the loop last.
        self.used_at = -math.inf

    def are_busy(self) -> bool:
        """Return whether one of those who are not limited uses the loop."""
        return time.perf_counter() - self.used_at < _IDLE_SECONDS

    def share(self, tenant: str) -> LoopShare | None:
        """Return the share of a tenant; None for the operator, "", who never waits."""
        if not tenant:
            self._others_at = self.loop.time()
            self.used_at = time.perf_counter()
            return None
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = LoopShare(self, tenant)
        return share

    def has_others(self, share: LoopShare) -> bool:
        """Return whether others than one tenant used the loop lately. Safe from any thread."""
        others = any(one is not share for one in self._active)
        return others or self.loop.time() - self._others_at < _ALONE_SECONDS

    def activate(self, share: LoopShare) -> None:
        """Look at a share from now on, until it is used no more."""
        share.active = True
        self._active.append(share)
        if len(self._active) == 1:
            self._ticked = self.loop.time()
            self.loop.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = self.loop.time()
        elapsed, self._ticked = max(now - self._ticked, 1e-6), now
        weight = 1.0 - math.exp(-elapsed / _AVERAGE_SECONDS)
        for share in self._active:
            share.rate += (share.used / elapsed - share.rate) * weight
            share.credit = max(share.credit - share.used, -_LARGEST_DEBT)
            share.used = 0.0
        self._limit(elapsed, alone=not self.has_others(self._active[0]))
        for share in self._active:
            share.active = share.rate > _NOTHING or bool(share.waiting)
        self._active = [share for share in self._active if share.active]
        if self._next is None:
            self._release()
        if self._active:
            self.loop.call_later(_TICK_SECONDS, self._tick)

    def _limit(self, elapsed: float, *, alone: bool) -> None:
        """Limit those that use most, so that all together stay below the target."""
        fair = (
            math.inf
            if alone
            else _fair_share([math.inf if share.waiting else share.rate for share in self._active])
        )
        for share in self._active:
            earned = fair * elapsed
            if fair == math.inf or not (share.waiting or share.rate > fair):
                share.limited, share.credit = False, 0.0
            else:
                share.limited, share.credit = True, min(share.credit, earned) + earned

    def _release(self) -> None:
        """Let one piece of work of each tenant start, and look again once it has."""
        self._next = None
        for share in self._active:
            while share.waiting and not share.used_up:
                turn = share.waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break
        if any(share.waiting and not share.used_up for share in self._active):
            self._next = self.loop.call_soon(self._release)


class _Metered(Coroutine[Any, Any, T]):
    """A coroutine whose steps are measured."""

    __slots__ = ("_share", "_work")

    def __init__(self, share: LoopShare, work: Coroutine[Any, Any, T]) -> None:
        self._share = share
        self._work = work

    def send(self, value: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._work.send(value)
        finally:
            self._share.charge(time.perf_counter() - started)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def __iter__(self) -> _Metered[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)


def _fair_share(demands: list[float]) -> float:
    """Return the greatest part of the time that each may use: infinite if there is enough."""
    left, ascending = TARGET, sorted(demands)
    for index, demand in enumerate(ascending):
        share = left / (len(ascending) - index)
        if demand > share:
            return share
        left -= demand
    return math.inf
