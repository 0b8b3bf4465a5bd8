"""The agents of an app that are at work, or were a moment ago: one harness for each id."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.initializing import init

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents.harness import Harness
    from smokebox.agents.log.store import Store
    from smokebox.app.served import ServedAgent


@dataclass(slots=True)
class _Entry:
    served: ServedAgent
    harness: Harness | None = None
    users: int = 0
    used_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Conversations:
    """Harnesses by agent and id. A workspace in memory lives as long as its harness: that is
    kept for `idle` seconds after it was last used."""

    def __init__(self, store: Store, env: Any, *, idle: float) -> None:
        self._store = store
        self._env = env
        self._idle = idle
        self._entries: dict[tuple[str, str], _Entry] = {}

    @contextlib.asynccontextmanager
    async def use(self, served: ServedAgent, id: str, payload: Any) -> AsyncIterator[Harness]:
        """The harness of a conversation, opened if need be.

        One whose agent was written anew since is made again, when nobody else uses it.
        """
        entry = self._entries.setdefault((served.name, id), _Entry(served))
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
        """The harness of a conversation, if it is open."""
        entry = self._entries.get((name, id))
        return None if entry is None else entry.harness

    async def sweep(self) -> None:
        """Let go of those that nobody has used for long."""
        longest = time.monotonic() - self._idle
        for key, entry in list(self._entries.items()):
            if entry.users == 0 and entry.used_at < longest:
                await self.let_go(*key)

    async def let_go(self, name: str, id: str) -> None:
        """Close a conversation's harness; its record stays."""
        entry = self._entries.pop((name, id), None)
        if entry is not None and entry.harness is not None:
            await entry.harness.aclose()

    async def aclose(self) -> None:
        """Leave all of them: what goes on continues when the app is started again."""
        entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            if entry.harness is not None:
                await entry.harness.leave()
