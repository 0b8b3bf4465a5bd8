"""Network of a sandbox: its egress policy, the log of its requests, and its ports."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from smokebox.client.port_socket import WebSocket, open_websocket
from smokebox.egress.handler import CATCH_ALL, CLIENT, check_handler
from smokebox.egress.policy import EgressInForce, handler_key
from smokebox.errors import InvalidOption
from smokebox.types import ExposedPort, NetworkEvent
from smokebox.wire import requests, responses
from smokebox.wire.codec import decode
from smokebox.wire.requests import ChangeEgress

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from smokebox.client.sandbox_connection import SandboxConnection
    from smokebox.egress.handler import HandlerOption


class SandboxNetwork:
    """Methods of `Sandbox` about its network: egress policy, its log, and ports.

    Changes of the policy survive sleep and restarts of the server, and override the settings,
    also when those are sent again. Handlers that are functions run in this process while the
    handle exists; without it, requests that need them are refused.
    """

    _connection: SandboxConnection

    async def get_egress(self) -> EgressInForce:
        """Return the policy in force; its `decide("api.github.com")` judges a host.

        Handlers are in it by name: `@client` is one that a client runs.
        """
        info = await self._connection.request(responses.EgressInfo, "GET", "/egress")
        return EgressInForce(**info.in_force)

    async def allow_host(self, host: str) -> None:
        """Allow a host, by name or glob, and remove a denial of the same name."""
        await self._change(ChangeEgress(allow=[host]))

    async def deny_host(self, host: str) -> None:
        """Deny a host, by name or glob. This overrides every entry that allows it."""
        await self._change(ChangeEgress(deny=[host]))

    async def remove_allowed_host(self, host: str) -> None:
        """Remove the entry that allows this name, from the settings or from `allow_host`."""
        await self._change(ChangeEgress(remove_allowed=[host]))

    async def remove_denied_host(self, host: str) -> None:
        """Remove the entry that denies this name, from the settings or from `deny_host`."""
        await self._change(ChangeEgress(remove_denied=[host]))

    async def set_internet(self, internet: bool | None) -> None:
        """Allow every public host, or stop that; None restores the value of the settings."""
        await self._change(ChangeEgress(internet=internet))

    async def set_outbound(self, handler: HandlerOption | None) -> None:
        """Replace the handler of all hosts that have no handler of their own.

        Args:
            handler: A function, or the name of a handler of the server; None for no handler.

        Raises:
            InvalidOption: It is not a handler.
        """
        if handler is not None:
            check_handler("outbound", handler)
        await self._set(CATCH_ALL, handler)

    async def set_outbound_by_host(self, host: str, handler: HandlerOption) -> None:
        """Set the handler of a host.

        Args:
            host: A name, a glob, or `name:port`.
            handler: A function, or the name of a handler of the server.

        Raises:
            InvalidOption: It is not a handler.
        """
        check_handler(f"outbound_by_host[{host!r}]", handler)
        await self._set(handler_key(host), handler)

    async def remove_outbound_by_host(self, host: str) -> None:
        """Remove the handler of this host, from the settings or set at run time."""
        await self._set(handler_key(host), None)

    async def reset_egress(self) -> None:
        """Discard all changes made at run time, so that only the settings apply."""
        await self._connection.request(
            responses.EgressInfo, "DELETE", "/egress/changes", timeout=None
        )

    async def network_log(self, *, after: int = 0, limit: int = 100) -> list[NetworkEvent]:
        """Return requests and connections of the sandbox, oldest first. Does not wake it.

        Args:
            after: Start after the event with this `cursor`.
            limit: Maximum number of events.
        """
        query = {"after": after, "limit": limit}
        response = await self._connection.request(
            responses.NetworkEvents, "GET", "/egress/log", query=query
        )
        return response.events

    async def follow_network_log(
        self, *, after: int | None = None
    ) -> AsyncGenerator[NetworkEvent, None]:
        """Yield requests and connections of the sandbox as they end.

        Resumes after a lost connection without missing events.

        Args:
            after: Start after the event with this `cursor`, by default with the next event.
        """
        events = self._connection.resumed_events("/egress/log/stream", {"cursor": after})
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == "request":
                    yield decode(NetworkEvent, event.data)

    async def expose_port(
        self,
        port: int,
        *,
        name: str | None = None,
        token: str | None = None,
        private: bool | None = None,
    ) -> ExposedPort:
        """Expose a port at a preview URL for the current run; wakes the sandbox.

        The URL stays the same when the sandbox sleeps, but works again only after the port
        is exposed in the next run.

        Args:
            port: Port number.
            name: Name for people.
            token: Secret in the URL, by default a random one.
            private: Require an API key of the server, or a URL that expires.

        Raises:
            Conflict: The port is exposed with another name or token.
        """
        body = requests.ExposePort(port=port, name=name, token=token, private=private)
        return await self._connection.request(
            ExposedPort, "POST", "/ports", body=body, timeout=None
        )

    async def get_preview_url(self, port: int, *, expires_in: float | None = None) -> str:
        """Return the preview URL of a port, exposing it if needed.

        Browsers open it. Programs take the header X-Smokebox-Token; see `expose_port`.

        Args:
            port: Port number.
            expires_in: Return a URL that works for this many seconds, also for a private port.
        """
        if isinstance(expires_in, float) and not math.isfinite(expires_in):
            # JSON has no such number: null would be sent, and the URL would never expire.
            raise InvalidOption(
                f"expires_in is a positive number of seconds, not {expires_in}.",
                hint="Leave it out for a URL that does not expire.",
                option="expires_in",
                value=expires_in,
            )
        body = requests.MakePreviewUrl(expires_in=expires_in)
        path = f"/ports/{port}/url"
        response = await self._connection.request(
            responses.PreviewUrl, "POST", path, body=body, timeout=None
        )
        return response.url

    async def unexpose_port(self, port: int) -> None:
        """Stop exposing a port and close connections to it. Safe to repeat."""
        await self._connection.request(type(None), "DELETE", f"/ports/{port}")

    async def get_exposed_ports(self) -> list[ExposedPort]:
        """Return the exposed ports, oldest first, including those of earlier runs."""
        return (await self._connection.request(responses.Ports, "GET", "/ports")).ports

    async def validate_port_token(self, port: int, token: str) -> bool:
        """Return whether a token opens a port."""
        body = requests.CheckToken(token=token)
        path = f"/ports/{port}/check"
        return (await self._connection.request(responses.TokenCheck, "POST", path, body=body)).valid

    async def ws_connect(
        self,
        port: int,
        path: str = "/",
        *,
        headers: Mapping[str, str] | None = None,
        subprotocols: Sequence[str] | None = None,
    ) -> WebSocket:
        """Open a WebSocket to a port of the sandbox, exposed or not; wakes the sandbox.

        Args:
            port: Port number.
            path: Path to request.
            headers: Headers of the handshake.
            subprotocols: Subprotocols to offer.

        Raises:
            InvalidOption: The port or the path is invalid.
            ServiceUnavailable: Nothing listens there, or the server refused it.
        """
        await self._connection.ensure_created()
        return await open_websocket(
            self._connection, port, path, headers=headers, subprotocols=subprotocols
        )

    async def _set(self, slot: str, handler: HandlerOption | None) -> None:
        handlers = self._connection.channel.handlers
        before = handlers.get(slot)
        named: str | None = CLIENT
        if handler is None or isinstance(handler, str):
            named = handler
        else:
            # Before the policy names it: from then on the server calls it.
            handlers[slot] = handler
            await self._connection.ensure_created()
            await self._connection.channel.open()
        change = ChangeEgress(outbound_by_host={slot: named})
        if slot == CATCH_ALL:
            change = ChangeEgress(outbound=named)
        try:
            await self._change(change)
        except BaseException:
            if before is not None:
                handlers[slot] = before
            elif named == CLIENT:
                handlers.pop(slot, None)
            raise
        if named != CLIENT:
            handlers.pop(slot, None)

    async def _change(self, change: ChangeEgress) -> None:
        await self._connection.request(
            responses.EgressInfo, "POST", "/egress/changes", body=change, timeout=None
        )
