"""The sessions of one harness, by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tasks import PREFIX
from smokebox.errors import Conflict, InvalidOption, NotFound

if TYPE_CHECKING:
    from smokebox.agents.harness import Harness
    from smokebox.agents.log.store import SessionSummary
    from smokebox.agents.session import Session

MAX_NAME = 200


class Sessions:
    """`harness.sessions`: lists them, and gets, makes and removes one by its name."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    async def list(self, *, tasks: bool = False) -> list[SessionSummary]:
        """Those of this instance, the one that changed last first; with `tasks` theirs too."""
        harness = self._harness
        found = await harness.store.sessions(agent=harness.agent.name, id=harness.id)
        return [
            one for one in found if harness.owns(one.key.session) and (tasks or one.parent is None)
        ]

    async def get(self, name: str) -> Session:
        """The session of that name. Raises `NotFound`."""
        if not await self._exists(name):
            raise NotFound(
                f"there is no session {name!r}.",
                hint="Make it with sessions.create(name), or use harness.session(name).",
                kind="session",
                name=name,
            )
        return await self._harness.session(name)

    async def create(self, name: str) -> Session:
        """A session of that name that was not there before. Raises `Conflict`."""
        if await self._exists(name):
            raise Conflict(
                f"there is a session {name!r} already.",
                hint="Open it with harness.session(name), or choose another name.",
                kind="session",
                name=name,
            )
        return await self._harness.session(name)

    async def delete(self, name: str) -> bool:
        """Remove a session with its record and its tasks; False where there is none.

        What it works on in this process is called off.
        """
        await self._harness.let_go(name)
        return await self._harness.store.delete(self._harness.key(name))

    async def _exists(self, name: str) -> bool:
        return bool(await self._harness.store.read(self._harness.key(name), limit=1))


def check_session_name(name: object) -> str:
    """`name`, once it is one that a program can give to a session."""
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable():
        if not name.startswith(PREFIX) and "/" not in name:
            return name
        reason = f"{name!r} is kept for the harness: {PREFIX!r} begins tasks, '/' parts harnesses."
    else:
        reason = f"a session's name is up to {MAX_NAME} characters in one line, not {name!r:.80}."
    raise InvalidOption(reason, hint="Pass for example 'default'.", option="name", value=name)
