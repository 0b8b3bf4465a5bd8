"""The ports of a sandbox: seen from outside by a URL, and connected to from here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from smokebox.client.handle import Handle
from smokebox.client.websocket import WebSocket, open_websocket
from smokebox.errors import InvalidOption
from smokebox.types import ExposedPort
from smokebox.wire import answers
from smokebox.wire.requests import CheckToken, ExposePort, MakePreviewUrl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Ports(Handle):
    """What listens in a sandbox, which nobody reaches unless it is exposed."""

    async def expose_port(
        self,
        port: int,
        *,
        name: str | None = None,
        token: str | None = None,
        private: bool | None = None,
    ) -> ExposedPort:
        """Have a port be seen at a URL, by whoever has that; wakes the sandbox.

        The URL stays when the sandbox sleeps, and is not answered until the port is exposed in
        a later run, by the same call again. `token` is a part of the URL, by default a random
        one. A `private` port is for who has a key of the server as well, or a URL that expires.
        Raises `Conflict` for a port that has another name or token.
        """
        body = ExposePort(port=port, name=name, token=token, private=private)
        return await self._ask(ExposedPort, "POST", "/ports", body=body, timeout=None)

    async def get_preview_url(self, port: int, *, expires_in: float | None = None) -> str:
        """The URL of a port, which is exposed if need be.

        With `expires_in` it is another one, good for so many seconds, which opens a private
        port as well.
        """
        if isinstance(expires_in, float) and not math.isfinite(expires_in):
            # JSON has no such number: null would be sent, and the URL be good for ever.
            raise InvalidOption(
                f"expires_in is a positive number of seconds, not {expires_in}.",
                hint="Leave it out for a URL that does not expire.",
                option="expires_in",
                value=expires_in,
            )
        body = MakePreviewUrl(expires_in=expires_in)
        path = f"/ports/{port}/url"
        return (await self._ask(answers.PreviewUrl, "POST", path, body=body, timeout=None)).url

    async def unexpose_port(self, port: int) -> None:
        """Have a port not be seen any more, and end connections to it. Safe to repeat."""
        await self._ask(type(None), "DELETE", f"/ports/{port}")

    async def get_exposed_ports(self) -> list[ExposedPort]:
        """The ports that were exposed, in that order, also those of former runs."""
        return (await self._ask(answers.Ports, "GET", "/ports")).ports

    async def validate_port_token(self, port: int, token: str) -> bool:
        """Whether a token opens a port."""
        body = CheckToken(token=token)
        path = f"/ports/{port}/check"
        return (await self._ask(answers.TokenCheck, "POST", path, body=body)).valid

    async def ws_connect(
        self,
        port: int,
        path: str = "/",
        *,
        headers: Mapping[str, str] | None = None,
        subprotocols: Sequence[str] | None = None,
    ) -> WebSocket:
        """A WebSocket to what listens on a port, exposed or not; wakes the sandbox.

        Raises `ServiceUnavailable` where nothing listens, or refuses it.
        """
        await self._be_there()
        return await open_websocket(self, port, path, headers=headers, subprotocols=subprotocols)
