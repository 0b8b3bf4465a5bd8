"""Fair shares of an event loop: work of many parties runs in turns, one step at a time.

An event loop runs every step that is ready, and so a party with a hundred connections gets a
hundred times the time of one with a single request. Here steps are measured. Once they have taken
`BUDGET_SECONDS` of an iteration of the loop, a party that has used more than others waits, and its
steps run later, those of the party that has used least first. As long as the loop is not busy,
nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections import deque
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

T = TypeVar("T")

# Time that the steps of one iteration may take before others wait.
BUDGET_SECONDS = 0.0002
# The time that a party has used counts half after so long.
_HALVING_SECONDS = 0.5
# Less than a step: a party without tasks is forgotten below it.
_NOTHING = 1e-5
# Time that it takes to relay a byte, with the work of the kernel.
_BYTE_SECONDS = 1e-9
# Share of the latest step in the expected cost of the next.
_LATEST = 0.25

# The party of this context: a tenant's key, or a sandbox whose traffic is served.
current_party: ContextVar[str] = ContextVar("current_party", default="")


class _Party:
    """The time that a party has used, and its steps that wait."""

    __slots__ = ("cost", "tasks", "used", "waiting")

    def __init__(self) -> None:
        self.used = 0.0
        self.cost = 0.0
        self.tasks = 0
        self.waiting: deque[asyncio.Future[None]] = deque()


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._parties: dict[str, _Party] = {}
        self._waiting: set[_Party] = set()
        self._spent = 0.0
        self._scheduled = False
        self._halve_at = 0.0

    async def run(self, party: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in turns, as work of a party.

        What it starts as tasks is not included: use `start_in_turns`.
        """
        found = self._find(party)
        found.tasks += 1
        current_party.set(party)
        try:
            return await self._steps(found, work)
        finally:
            found.tasks -= 1

    async def pause(self, party: str, size: int) -> None:
        """Count the bytes that a party has just relayed, and wait until it may relay more.

        For work that is not run in turns, because measuring it would cost too much.
        """
        found = self._find(party)
        self._charge(found, size * _BYTE_SECONDS)
        if (self._waiting or self._spent >= BUDGET_SECONDS) and self._must_wait(found):
            await self._wait(found)

    def _find(self, party: str) -> _Party:
        found = self._parties.get(party)
        if found is None:
            found = self._parties[party] = _Party()
        return found

    @types.coroutine
    def _steps(self, party: _Party, work: Coroutine[Any, Any, T]) -> Generator[Any, None, T]:
        """Drive a coroutine, and wait for a turn before a step if need be."""
        error: BaseException | None = None
        while True:
            busy = self._waiting or self._spent >= BUDGET_SECONDS
            if busy and error is None and self._must_wait(party):
                try:
                    yield from self._wait(party)
                except BaseException as cancelled:
                    error = cancelled
            started = perf_counter()
            try:
                awaited = work.send(None) if error is None else work.throw(error)
            except StopIteration as result:
                return result.value  # type: ignore[no-any-return]
            finally:
                error = None
                self._charge(party, perf_counter() - started)
            try:
                yield awaited
            except BaseException as raised:
                error = raised

    def _must_wait(self, party: _Party) -> bool:
        return not self._waiting or party.used >= min(one.used for one in self._waiting)

    @types.coroutine
    def _wait(self, party: _Party) -> Generator[Any, None, None]:
        turn = self.loop.create_future()
        party.waiting.append(turn)
        self._waiting.add(party)
        self._schedule()
        try:
            yield from turn
        except BaseException:
            with contextlib.suppress(ValueError):
                party.waiting.remove(turn)
            if not party.waiting:
                self._waiting.discard(party)
            raise

    def _charge(self, party: _Party, seconds: float) -> None:
        self._spent += seconds
        party.used += seconds
        party.cost += (seconds - party.cost) * _LATEST
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        """Give turns to as many steps as fit, to the party that has used least first."""
        self._scheduled = False
        self._spent = planned = 0.0
        if (now := self.loop.time()) >= self._halve_at:
            self._halve_at = now + _HALVING_SECONDS
            self._halve()
        # Woken parties may have more steps before these are charged.
        expected: dict[_Party, float] = {}
        while self._waiting and planned < BUDGET_SECONDS:
            party = min(self._waiting, key=lambda one: one.used + expected.get(one, 0.0))
            turn = party.waiting.popleft()
            if not party.waiting:
                self._waiting.discard(party)
            if not turn.done():
                turn.set_result(None)
                planned += party.cost
                expected[party] = expected.get(party, 0.0) + party.cost
        if self._waiting:
            self._schedule()

    def _halve(self) -> None:
        for party in self._parties.values():
            party.used /= 2
        idle = [name for name, one in self._parties.items() if not one.tasks]
        for name in idle:
            if self._parties[name].used < _NOTHING:
                del self._parties[name]


class _Latest(threading.local):
    turns: Turns | None = None


_latest = _Latest()


def turns() -> Turns:
    """Return the turns of the running event loop, of which a thread has one after the other."""
    found = _latest.turns
    if found is None or found.loop is not asyncio.get_running_loop():
        found = _latest.turns = Turns()
    return found


def start_in_turns(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that runs in turns, as work of the party of this context, if there is one."""
    party = current_party.get()
    if not party:
        return asyncio.create_task(work)
    task = asyncio.create_task(turns().run(party, work))
    # A task that is cancelled before its first step does not begin its work.
    task.add_done_callback(lambda _: work.close())
    return task
