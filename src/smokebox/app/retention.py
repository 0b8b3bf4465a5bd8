"""Forgets what has been over for longer than the app keeps it: submissions, runs, conversations."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.agents.log.store import Store
    from smokebox.app.conversations import Conversations
    from smokebox.app.inbox import Inbox
    from smokebox.app.submission import Target


async def forget_old(
    inbox: Inbox, store: Store, conversations: Conversations, before: float
) -> None:
    """Forget what ended before that time. A conversation goes with the last of its work."""
    more = True
    while more:
        async with inbox.expired(before) as targets:
            for target in targets:
                await _forget(target, store, conversations)
        more = bool(targets)
    await inbox.sweep(before)


async def _forget(target: Target, store: Store, conversations: Conversations) -> None:
    """Remove the records of a target: a workflow has agents of any name work under its id."""
    agent = target.name if target.kind == "agent" else None
    if agent is not None:
        await conversations.let_go(agent, target.id)
    for found in await store.sessions(agent=agent, id=target.id):
        # One that was forked goes when the forks have gone, and tasks with their parents.
        if found.parent is None:
            with contextlib.suppress(SmokeboxError):
                await store.delete(found.key)
