"""Streams of events that go on by themselves where a lost connection left them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from smokebox.client.answering import is_lost
from smokebox.errors import SandboxGone, ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from smokebox.client.handle import Handle
    from smokebox.wire.sse import Event

_ATTEMPTS = 8
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


async def resumed(
    sandbox: Handle, path: str, query: Mapping[str, Any]
) -> AsyncGenerator[Event, None]:
    """The events of a stream; `cursor` of the query is where it begins.

    A connection that is lost is made anew, from the cursor of the last event on, until so
    many attempts in a row gave nothing.
    """
    query, failed = dict(query), 0
    while True:
        try:
            async with contextlib.aclosing(sandbox._events("GET", path, query=query)) as events:
                async for event in events:
                    if event.id is not None:
                        query["cursor"] = event.id
                    failed = 0
                    yield event
            return
        except (SandboxGone, ServiceUnavailable) as error:
            failed += 1
            again = is_lost(error) or isinstance(error, ServiceUnavailable)
            if not again or failed == _ATTEMPTS:
                raise
        await asyncio.sleep(min(_FIRST_PAUSE * 2**failed, _LONGEST_PAUSE))
