"""What happens to one submission, as events: of an agent from the record of its conversation, of a
function what it logs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from smokebox.agents.harness import DEFAULT
from smokebox.agents.log.store import SessionKey
from smokebox.app.served import ServedAgent
from smokebox.app.streams import Notes, Records, line_of
from smokebox.app.unit import Unit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.app.app import App
    from smokebox.app.streams import Line
    from smokebox.app.submission import Submission


def happenings(app: App, submission: Submission, after: int) -> AsyncGenerator[bytes, None]:
    """The events of a submission behind an offset as they are sent, until its end."""
    served = app.project.find(submission.target.kind, submission.target.name)
    if isinstance(served, ServedAgent):
        return _recorded(app, submission, after)
    return app.streams.events(Notes(app.inbox, submission.id), after)


async def _recorded(app: App, submission: Submission, after: int) -> AsyncGenerator[bytes, None]:
    target, unit = submission.target, Unit(submission.id)
    key, at = SessionKey(target.name, target.id, DEFAULT), submission.head
    ended = asyncio.create_task(app.inbox.wait(submission.id))
    lines = app.streams.lines(Records(app.store, key), at)
    following: asyncio.Task[Line | None] | None = None
    try:
        while not unit.ended:
            following = following or asyncio.ensure_future(anext(lines, None))
            await asyncio.wait([following, ended], return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                break
            line, following = following.result(), None
            if line is None:
                return
            at = line.offset
            if unit.takes(line) and at > after:
                yield line.event
        # Its outcome is recorded before the inbox has it, so the store has all that is left;
        # what fails before it is begun has no record.
        while not unit.ended and (page := await app.store.read(key, after=at)):
            for line in map(line_of, page):
                at = line.offset
                if unit.takes(line) and at > after:
                    yield line.event
    finally:
        ended.cancel()
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await following
        await lines.aclose()
