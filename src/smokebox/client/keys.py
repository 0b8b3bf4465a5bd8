"""The API keys of a server: made, listed, revoked. For administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.handle import part
from smokebox.wire import answers
from smokebox.wire.answers import KeyInfo, NewKey
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from smokebox.client.transport import Transport


class Keys:
    """The keys of one server, as `Client.keys`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[KeyInfo]:
        """All keys, without their secrets, in the order in which they were made."""
        return (await self._transport.ask(answers.Keys, "GET", "/keys")).keys

    async def create(
        self,
        name: str,
        *,
        prefix: str = "",
        admin: bool = False,
        expires_in: float | None = None,
    ) -> NewKey:
        """A key for the sandboxes whose ids begin with `prefix`, and for all else with `admin`.

        Its secret, in `key`, is told this once.
        """
        body = CreateKey(name=name, prefix=prefix, admin=admin, expires_in=expires_in)
        return await self._transport.ask(NewKey, "POST", "/keys", body=body)

    async def revoke(self, id: str) -> None:
        """Revoke a key, by its id."""
        await self._transport.ask(type(None), "DELETE", f"/keys/{part('key', id)}")
