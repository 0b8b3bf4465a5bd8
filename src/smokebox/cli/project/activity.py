"""Activity of an app in a terminal: records of its sessions, and events of its runs."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from smokebox.app.definitions import ServedAgent
from smokebox.cli.agents.views import RecordView
from smokebox.cli.output import report
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.agents.log.store import SessionKey, SessionSummary
    from smokebox.app.app import App
    from smokebox.app.inbox import AppInbox, WorkTarget

_POLL_SECONDS = 0.3
_RETRY_SECONDS = 5.0
_SESSIONS = 50
_RECENT_SECONDS = 30.0
_COLOURS = {"warning": "yellow", "error": "red"}


class ActivityView:
    """Prints what is added to the records of an app.

    With `inbox` and `id`, prints one run of another inbox than the app's.
    """

    def __init__(self, app: App, *, inbox: AppInbox | None = None, id: str | None = None) -> None:
        self._app = app
        self._inbox = inbox or app.inbox
        self._id = id
        self._view = RecordView()
        self._since = time.time()
        self._sessions: dict[tuple[SessionKey, float], int] = {}
        self._offsets: dict[str, int] = {}
        self._last: object = None

    async def follow(self) -> None:
        """Print activity until cancelled."""
        while True:
            try:
                await self.update()
            except SmokeboxError as error:
                # The app is still served, so keep watching it.
                report(error)
                await asyncio.sleep(_RETRY_SECONDS)
            await asyncio.sleep(_POLL_SECONDS)

    async def update(self) -> None:
        """Print what has been added since the last call."""
        for one in reversed(await self._app.store.sessions(id=self._id, limit=_SESSIONS)):
            if one.updated_at >= self._since and one.head > self._seen(one):
                await self._show_session(one)
        since = max(self._since, time.time() - _RECENT_SECONDS)
        for id, target in await self._inbox.recent(since):
            await self._show_events(id, target)
        sys.stdout.flush()

    def _seen(self, one: SessionSummary) -> int:
        # A session that was deleted and created again has the same key.
        return self._sessions.get((one.key, one.created_at), 0)

    async def _show_session(self, one: SessionSummary) -> None:
        key, after = one.key, self._seen(one)
        while page := await self._app.store.read(key, after=after):
            self._sessions[key, one.created_at] = after = page[-1].offset
            page = [stored for stored in page if stored.at >= self._since]
            if not page:
                continue
            name = f"{key.agent}/{key.id}"
            self._print_heading(key, name if key.session == "default" else f"{name}/{key.session}")
            for stored in page:
                self._view.show(stored)

    async def _show_events(self, id: str, target: WorkTarget) -> None:
        for stored in await self._inbox.events(id, after=self._offsets.get(id, 0)):
            self._offsets[id] = stored.offset
            event: dict[str, Any] = msgspec.json.decode(stored.data)
            # The outcome of an agent is in its records, unless it failed before it had any.
            if event.get("error") is None and self._is_agent(target):
                continue
            name = f"{target.name}/{target.id}"
            self._print_heading(
                id,
                f"workflows/{target.name} {target.id[:8]}" if target.kind == "workflow" else name,
            )
            _print_event(event.pop("event"), event)

    def _is_agent(self, target: WorkTarget) -> bool:
        return isinstance(self._app.project.agents.get(target.name), ServedAgent) and (
            target.kind == "agent"
        )

    def _print_heading(self, source: object, name: str) -> None:
        if source != self._last:
            typer.secho(f"── {name}", fg="blue")
        self._last = source


def _print_event(event: str, fields: dict[str, Any]) -> None:
    level = str(fields.pop("level", ""))
    text = fields.pop("message", event)
    if event == "ended":
        error = fields.get("error")
        text = fields["outcome"] if error is None else f"{fields['outcome']}: {error['message']}"
        level, fields = "" if error is None else "warning", {"result": fields.get("result")}
    fields = fields.pop("fields", fields)
    shown = " ".join(f"{name}={json.dumps(value)}"[:200] for name, value in fields.items())
    colour = _COLOURS.get(level)
    typer.secho(f"  {text} {shown}".rstrip(), fg=colour, dim=colour is None)
