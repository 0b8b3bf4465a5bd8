"""Requests to a server under test, with their responses read completely."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import aiohttp
    from multidict import CIMultiDictProxy


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A response; `body` is its decoded JSON."""

    status: int
    headers: CIMultiDictProxy[str]
    body: Any

    @property
    def code(self) -> str:
        """The code of an error response."""
        return str(self.body["error"]["code"])


async def fetch(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> HttpResponse:
    """Send a request: `await fetch(http.get("/api/sandboxes"))`."""
    async with request as response:
        data = await response.read()
        return HttpResponse(
            status=response.status,
            headers=response.headers,
            body=json.loads(data) if data else None,
        )
