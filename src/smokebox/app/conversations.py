"""Open conversations of an app: one harness for each id."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.harness import init, suspend
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents.harness import Harness
    from smokebox.agents.log.store import SessionStore
    from smokebox.app.definitions import ServedAgent
    from smokebox.app.inbox import AppInbox, WorkTarget


@dataclass(slots=True)
class _OpenConversation:
    served: ServedAgent
    harness: Harness | None = None
    users: int = 0
    used_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class OpenConversations:
    """Harnesses by agent and id.

    An in-memory workspace lives as long as its harness, which is kept for `idle` seconds after its
    last use.
    """

    def __init__(self, store: SessionStore, env: Any, *, idle: float) -> None:
        self._store = store
        self._env = env
        self._idle = idle
        self._entries: dict[tuple[str, str], _OpenConversation] = {}

    @contextlib.asynccontextmanager
    async def use(self, served: ServedAgent, id: str, payload: Any) -> AsyncIterator[Harness]:
        """Open the harness of a conversation, or return the open one.

        If the agent's file changed, the harness is replaced once it is unused.
        """
        entry = self._entries.setdefault((served.name, id), _OpenConversation(served))
        entry.users += 1
        try:
            async with entry.lock:
                if entry.served is not served and entry.users == 1 and entry.harness is not None:
                    await entry.harness.aclose()
                    entry.harness = None
                if entry.harness is None:
                    entry.served = served
                    entry.harness = await init(
                        served.agent, id=id, env=self._env, payload=payload, store=self._store
                    )
            yield entry.harness
        finally:
            entry.users -= 1
            entry.used_at = time.monotonic()
            if entry.harness is None and entry.users == 0:
                self._entries.pop((served.name, id), None)

    def find(self, name: str, id: str) -> Harness | None:
        """Return the harness of a conversation, if it is open."""
        entry = self._entries.get((name, id))
        return None if entry is None else entry.harness

    async def sweep(self) -> None:
        """Close harnesses that have been idle for too long."""
        idle_since = time.monotonic() - self._idle
        for key, entry in list(self._entries.items()):
            if entry.users == 0 and entry.used_at < idle_since:
                await self.close(*key)

    async def close(self, name: str, id: str) -> None:
        """Close the harness of a conversation, whose records are kept."""
        entry = self._entries.pop((name, id), None)
        if entry is not None and entry.harness is not None:
            await entry.harness.aclose()

    async def aclose(self) -> None:
        """Suspend all harnesses; their work continues when the app is started again."""
        entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            if entry.harness is not None:
                await suspend(entry.harness)


async def delete_expired(
    inbox: AppInbox, store: SessionStore, conversations: OpenConversations, before: float
) -> None:
    """Delete work that ended before that time, and conversations that have no other work."""
    more = True
    while more:
        async with inbox.expired(before) as targets:
            for target in targets:
                await _delete(target, store, conversations)
        more = bool(targets)
    await inbox.delete_ended(before)


async def _delete(
    target: WorkTarget, store: SessionStore, conversations: OpenConversations
) -> None:
    """Delete the records of a target. The agents of a workflow may have any name."""
    agent = target.name if target.kind == "agent" else None
    if agent is not None:
        await conversations.close(agent, target.id)
    for found in await store.sessions(agent=agent, id=target.id):
        # A forked conversation is deleted after its forks, and tasks with their parents.
        if found.parent is None:
            with contextlib.suppress(SmokeboxError):
                await store.delete(found.key)
