"""API keys: kept as hashes, each for what it was made for, until it expires or is revoked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import Unauthorized
from smokebox.server.principal import LOCAL, Principal

if TYPE_CHECKING:
    from starlette.types import Scope

    from smokebox.server.settings import Settings


class Keys:
    """The keys of one server."""

    def __init__(self, settings: Settings) -> None:
        self._needed = settings.needs_keys

    def principal(self, scope: Scope, headers: dict[bytes, bytes]) -> Principal:
        """Whoever sent a request by TCP. Raises `Unauthorized`."""
        if not self._needed:
            return LOCAL
        raise Unauthorized(
            "this server wants a key.",
            hint="Send the header Authorization: Bearer <key>; see `smokebox keys create`.",
        )
