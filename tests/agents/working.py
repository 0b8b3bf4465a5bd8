"""An agent at work in a test: scripted, in memory, and looked at through its record."""

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
async def at_work(*turns: Any, model: Any = None, **options: Any) -> AsyncIterator[Session]:
    """A session of an agent that says what is written down; without a workspace unless told."""
    options.setdefault("sandbox", None)
    options.setdefault("persist", MemoryStore())
    options.setdefault("durability", QUICK)
    async with init(model=model or ScriptedModel(*turns), **options) as harness:
        yield await harness.session()


def event_log(session: Session) -> EventLog:
    """The event log of a session, which is not public."""
    return session._context.event_log


async def records(session: Session) -> list[Record]:
    """All that is recorded of it."""
    return [stored.record for stored in await event_log(session).store.read(session.key)]


async def kinds(session: Session) -> list[str]:
    """What is recorded of it, by the names of the records."""
    return [type(record).__name__ for record in await records(session)]


async def of_kind(session: Session, kind: type[T]) -> list[T]:
    """The records of one kind."""
    return [record for record in await records(session) if isinstance(record, kind)]


async def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something to be true."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.002)


async def first(operation: Operation[Any], kind: type[T]) -> T:
    """The first event of a kind."""
    async with asyncio.timeout(10):
        async for event in operation:
            if isinstance(event, kind):
                return event
    raise AssertionError(f"there was no {kind.__name__}")


def model_of(harness: Harness) -> ScriptedModel:
    """The scripted model of an agent."""
    model = harness._setup.options.model[0]
    assert isinstance(model, ScriptedModel)
    return model
