"""A session of a scripted agent for tests, and helpers that inspect its event log."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from smokebox.agents import Durability, init
from smokebox.agents.log.memory import MemoryStore
from smokebox.testing import ScriptedModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smokebox.agents import Harness, Session
    from smokebox.agents.log.event_log import EventLog
    from smokebox.agents.log.records import Record
    from smokebox.agents.operation import Operation

T = TypeVar("T")

QUICK = Durability(retry_delay=0.001)


@asynccontextmanager
async def scripted_session(
    *turns: Any, model: Any = None, **options: Any
) -> AsyncIterator[Session]:
    """Open a session of an agent with scripted turns; by default without a workspace."""
    options.setdefault("sandbox", None)
    options.setdefault("persist", MemoryStore())
    options.setdefault("durability", QUICK)
    async with init(model=model or ScriptedModel(*turns), **options) as harness:
        yield await harness.session()


def event_log(session: Session) -> EventLog:
    """Return the event log of a session, which is not public."""
    return session._context.event_log


async def records(session: Session) -> list[Record]:
    """Return all records of a session."""
    return [stored.record for stored in await event_log(session).store.read(session.key)]


async def record_names(session: Session) -> list[str]:
    """Return the class names of all records of a session."""
    return [type(record).__name__ for record in await records(session)]


async def records_of(session: Session, kind: type[T]) -> list[T]:
    """Return the records of one class."""
    return [record for record in await records(session) if isinstance(record, kind)]


async def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def first_event(operation: Operation[Any], kind: type[T]) -> T:
    """Return the first event of a class."""
    async with asyncio.timeout(10):
        async for event in operation:
            if isinstance(event, kind):
                return event
    raise AssertionError(f"there was no {kind.__name__}")


def scripted_model(harness: Harness) -> ScriptedModel:
    """Return the scripted model of a harness."""
    model = harness._setup.options.model[0]
    assert isinstance(model, ScriptedModel)
    return model
