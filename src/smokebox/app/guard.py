"""ASGI middleware of an app: a check of Host and Origin, and draining of open requests."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from smokebox.app.request import error_response
from smokebox.errors import Forbidden, ServiceUnavailable
from smokebox.wire.failure import failure_of, status_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
# A host name or IPv4 address, or an IPv6 address in brackets, with an optional port.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")


class OriginGuard:
    """Rejects requests that a browser sends on behalf of another site.

    Such a page can send a simple request without a preflight, or point its own host name here (DNS
    rebinding). An app with keys needs no such check: a page does not have them.
    """

    def __init__(self, app: ASGIApp, host: str, *, guarded: bool) -> None:
        self._app = app
        self._names = _LOCAL | {host.strip("[]").lower()}
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with 403."""
        if self._guarded and scope["type"] in ("http", "websocket"):
            reason = self._rejection([(a, b.decode("latin-1")) for a, b in scope["headers"]])
            if reason is not None:
                error = Forbidden(
                    reason,
                    hint="Start the app with --keys and send a key; see `smokebox keys create`. "
                    "Behind a proxy that authenticates, listen on another address than the "
                    "loopback with --no-keys.",
                    reason="origin",
                )
                await error_response(failure_of(error), 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _rejection(self, headers: list[tuple[bytes, str]]) -> str | None:
        hosts = [value for name, value in headers if name == b"host"] or [""]
        for host in hosts:
            found = _HOST.fullmatch(host)
            name = (found[1] or found[2]).lower().removesuffix(".") if found else ""
            if name not in self._names:
                return f"this app is not served as host {host!r:.100}."
        origins = [value for name, value in headers if name == b"origin"]
        for origin in origins:
            if origin.partition("://")[2].lower() != hosts[0].lower():
                return f"requests from pages of {origin!r:.100} are not allowed."
        values = dict(headers)
        foreign = values.get(b"sec-fetch-site") in ("cross-site", "same-site")
        if foreign and not origins and values.get(b"sec-fetch-mode") != "navigate":
            # Images and scripts of a page have no Origin.
            return "requests from pages of other sites are not allowed."
        return None


_GRACE_SECONDS = 0.5


class RequestDrain:
    """Ends open requests at shutdown: streams are closed, and pending requests get 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # Open requests; True once their response has started.
        self._open: dict[asyncio.Task[object], bool] = {}
        self._closed = False

    async def close(self) -> None:
        """Wait a moment for open requests, then cancel the rest."""
        self._closed = True
        if self._open:
            await asyncio.wait(list(self._open), timeout=_GRACE_SECONDS)
        for task in list(self._open):
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and remember it while it is open."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return

        async def send_and_mark(message: Message) -> None:
            self._open[task] = True
            await send(message)

        self._open[task] = False
        try:
            await self._app(scope, receive, send_and_mark)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            task.uncancel()
            if self._open[task]:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                error = ServiceUnavailable(
                    "the app is shutting down.",
                    hint="Retry; accepted work continues after a restart.",
                )
                response = error_response(failure_of(error), status_of(type(error)))
                await response(scope, receive, send)
        finally:
            del self._open[task]
