"""What keeps web pages of others from an app that wants no key."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from smokebox.app.call import refusal
from smokebox.errors import Forbidden
from smokebox.wire.failure import failure_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
# A name or an IPv4 address, or an IPv6 address in brackets, and a port.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")


class Gate:
    """Refuses what a page of another site has a browser send to this machine.

    Such a page can send a message without asking first, or have its own name lead here (DNS
    rebinding). Who has a key needs no gate: no page has that.
    """

    def __init__(self, app: ASGIApp, host: str, *, guarded: bool) -> None:
        self._app = app
        self._names = _LOCAL | {host.strip("[]").lower()}
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it through, or answer 403."""
        if self._guarded and scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
            reason = self._refused(
                headers.get("host", b"").decode("latin-1"),
                headers.get("origin", b"").decode("latin-1"),
            )
            if reason is not None:
                error = Forbidden(
                    reason,
                    hint="Set SMOKEBOX_APP_KEYS, and send one of them; behind a proxy that keeps "
                    "the door, start it with --open.",
                    reason="origin",
                )
                await refusal(failure_of(error), 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refused(self, host: str, origin: str) -> str | None:
        found = _HOST.fullmatch(host)
        name = (found[1] or found[2]).lower().removesuffix(".") if found else ""
        if name not in self._names:
            return f"this app is not asked by the name {host!r:.100}."
        if origin and origin.partition("://")[2].lower() != host.lower():
            return f"pages of {origin!r:.100} may not ask this app."
        return None
