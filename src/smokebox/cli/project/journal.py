"""The agents and workflows of an app at work, as who develops them sees them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from smokebox.app.served import ServedAgent
from smokebox.cli.failure import report
from smokebox.cli.recorded import RecordView
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.agents.log.store import SessionKey, SessionSummary
    from smokebox.app.app import App
    from smokebox.app.inbox import Inbox
    from smokebox.app.submission import Target

_SECONDS = 0.3
_AGAIN_SECONDS = 5.0
_SESSIONS = 50
_LATELY_SECONDS = 30.0
_COLOURS = {"warning": "yellow", "error": "red"}


class Journal:
    """Writes what is added to the records of an app; with `inbox` and `id`, of one run that is
    in another inbox than the app's."""

    def __init__(self, app: App, *, inbox: Inbox | None = None, id: str | None = None) -> None:
        self._app = app
        self._inbox = inbox or app.inbox
        self._id = id
        self._view = RecordView()
        self._since = time.time()
        self._sessions: dict[tuple[SessionKey, float], int] = {}
        self._noted: dict[str, int] = {}
        self._last: object = None

    async def follow(self) -> None:
        """Go on until cancelled."""
        while True:
            try:
                await self.look()
            except SmokeboxError as error:
                # Whoever serves goes on, and so do we.
                report(error)
                await asyncio.sleep(_AGAIN_SECONDS)
            await asyncio.sleep(_SECONDS)

    async def look(self) -> None:
        """Write what is there that was not written."""
        for one in reversed(await self._app.store.sessions(id=self._id, limit=_SESSIONS)):
            if one.updated_at >= self._since and one.head > self._seen(one):
                await self._show_session(one)
        since = max(self._since, time.time() - _LATELY_SECONDS)
        for id, target in await self._inbox.lately(since):
            await self._show_notes(id, target)
        sys.stdout.flush()

    def _seen(self, one: SessionSummary) -> int:
        # One that was deleted and begun anew has the same key.
        return self._sessions.get((one.key, one.created_at), 0)

    async def _show_session(self, one: SessionSummary) -> None:
        key, after = one.key, self._seen(one)
        while page := await self._app.store.read(key, after=after):
            self._sessions[key, one.created_at] = after = page[-1].offset
            page = [stored for stored in page if stored.at >= self._since]
            if not page:
                continue
            name = f"{key.agent}/{key.id}"
            self._head(key, name if key.session == "default" else f"{name}/{key.session}")
            for stored in page:
                self._view.show(stored)

    async def _show_notes(self, id: str, target: Target) -> None:
        after = self._noted.get(id, 0)
        for note in await self._inbox.notes(id, after=after):
            self._noted[id] = note.place
            told: dict[str, Any] = msgspec.json.decode(note.data)
            # What an agent came to is in its record, unless it failed before there was one.
            if told.get("error") is None and self._is_agent(target):
                continue
            name = f"{target.name}/{target.id}"
            self._head(
                id,
                f"workflows/{target.name} {target.id[:8]}" if target.kind == "workflow" else name,
            )
            _tell(told.pop("event"), told)

    def _is_agent(self, target: Target) -> bool:
        return isinstance(self._app.project.agents.get(target.name), ServedAgent) and (
            target.kind == "agent"
        )

    def _head(self, of: object, name: str) -> None:
        if of != self._last:
            typer.secho(f"── {name}", fg="blue")
        self._last = of


def _tell(event: str, told: dict[str, Any]) -> None:
    level = str(told.pop("level", ""))
    words = told.pop("message", event)
    if event == "ended":
        error = told.get("error")
        words = told["outcome"] if error is None else f"{told['outcome']}: {error['message']}"
        level, told = "" if error is None else "warning", {"result": told.get("result")}
    fields = told.pop("fields", told)
    shown = " ".join(f"{name}={json.dumps(value)}"[:200] for name, value in fields.items())
    colour = _COLOURS.get(level)
    typer.secho(f"  {words} {shown}".rstrip(), fg=colour, dim=colour is None)
