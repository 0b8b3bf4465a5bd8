"""Work that an app has accepted, as whoever gave it holds it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.client.answering import is_lost
from smokebox.errors import DeadlineExceeded, SandboxGone, ServiceUnavailable
from smokebox.wire import work
from smokebox.wire.failure import error_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.client.transport import Transport
    from smokebox.wire import sse

# Less than the silence after which a server is taken for dead.
_WAIT = 10.0
# How long an app may be away before whoever follows something gives up.
PATIENCE = 60.0
_PAUSE = 0.5
_OUTCOME, _SUBMISSION = "outcome", "submission"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvent:
    """Something that happened. `offset` is where to go on behind it, `data` what it was."""

    type: str
    offset: int
    at: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What work came to. Of an agent's answer `text` is the words, and `data` the result that
    has a type; of a workflow `result` is what it returned."""

    submission_id: str
    result: Any

    @property
    def text(self) -> str:
        """What an agent answered; "" for what is no answer."""
        return str(self._of_answer("text") or "")

    @property
    def data(self) -> Any:
        """The structured result of an agent's answer."""
        return self._of_answer("data")

    @property
    def usage(self) -> dict[str, Any]:
        """What it took."""
        return dict(self._of_answer("usage") or {})

    def __str__(self) -> str:
        return self.text

    def _of_answer(self, name: str) -> Any:
        return self.result.get(name) if isinstance(self.result, dict) else None


class Submitted:
    """Accepted work. `id` finds it again: `client.submission(id)`.

    `target_id` is the id of the conversation or the run, None where that was not told.
    """

    def __init__(self, transport: Transport, id: str, *, target_id: str | None = None) -> None:
        self.id = id
        self.target_id = target_id
        self._transport = transport

    async def info(self) -> work.Work:
        """How it stands."""
        return await self._transport.ask(work.Work, "GET", self._path)

    async def wait(self, timeout: float | None = None) -> Outcome:
        """Wait for what it comes to; the work goes on where the time is up.

        Raises what it failed with, as the class that it was, and `Aborted` where it was called
        off. An app that is started again meanwhile is waited for.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        away = _Away()
        while True:
            left = _WAIT if deadline is None else min(_WAIT, deadline - time.monotonic())
            try:
                query = {"wait": max(0.0, round(left, 3))}
                found = await self._transport.ask(work.Work, "GET", self._path, query=query)
                away.back()
            except (SandboxGone, ServiceUnavailable) as error:
                await away.bear(error)
                continue
            if found.state == "ended":
                return _outcome(found)
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the work {self.id} was not done in {timeout:g} s, and goes on.",
                    hint="Wait longer, or call it off with abort().",
                    operation="wait",
                    timeout=timeout,
                )

    async def events(self, *, offset: int = 0) -> AsyncGenerator[AgentEvent, None]:
        """What happened to it behind an offset, then what happens, until its end."""
        async for event in resumed(self._transport, self._path, offset):
            if event.name == _OUTCOME:
                return
            if event.name != _SUBMISSION:
                yield event_of(event.data)

    async def abort(self) -> bool:
        """Call it off; False where it has ended before."""
        found = await self.info()
        if found.kind == "agent":
            path, body = f"/agents/{found.name}/{found.id}/abort", work.AbortBody(self.id)
        else:
            path, body = f"/runs/{found.id}/abort", None
        told = await self._transport.ask(work.Aborted, "POST", path, body=body)
        return self.id in told.aborted

    @property
    def _path(self) -> str:
        return f"/submissions/{self.id}"


class _Away:
    """How long an app has not answered."""

    def __init__(self) -> None:
        self._since: float | None = None

    def back(self) -> None:
        """It has answered."""
        self._since = None

    async def bear(self, error: Exception) -> None:
        """Wait a little, or raise the error when it was away for too long."""
        self._since = self._since or time.monotonic()
        lost = isinstance(error, ServiceUnavailable) or is_lost(error)
        if not lost or time.monotonic() - self._since > PATIENCE:
            raise error
        await asyncio.sleep(_PAUSE)


async def resumed(transport: Transport, path: str, offset: int) -> AsyncGenerator[sse.Event, None]:
    """The events at a path behind an offset, without end: asked for anew whenever they end.

    Raises `ServiceUnavailable` or `SandboxGone` for an app that does not come back.
    """
    away = _Away()
    while True:
        try:
            headers = {"accept": "text/event-stream", "last-event-id": str(offset)}
            async with contextlib.aclosing(
                transport.events("GET", path, headers=headers)
            ) as events:
                async for event in events:
                    away.back()
                    if event.id is not None:
                        offset = int(event.id)
                    yield event
            # The app was stopped, in order, and is about to be started again.
            await asyncio.sleep(_PAUSE)
        except (SandboxGone, ServiceUnavailable) as error:
            await away.bear(error)


def event_of(data: bytes) -> AgentEvent:
    """An event as the wire has it."""
    plain: dict[str, Any] = msgspec.json.decode(data)
    return AgentEvent(
        type=plain.pop("type"), offset=plain.pop("offset"), at=plain.pop("at"), data=plain
    )


def _outcome(found: work.Work) -> Outcome:
    if found.failure is not None:
        raise error_of(found.failure)
    return Outcome(submission_id=found.submission_id, result=found.result)
