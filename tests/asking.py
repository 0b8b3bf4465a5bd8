"""Plain requests to a server, read to their end whatever is looked at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import aiohttp
    from multidict import CIMultiDictProxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answered; `body` is its JSON."""

    status: int
    headers: CIMultiDictProxy[str]
    body: Any

    @property
    def code(self) -> str:
        """The code of the error that it is."""
        return str(self.body["error"]["code"])


async def ask(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Answer:
    """Send a request: `await ask(http.get("/api/sandboxes"))`."""
    async with request as answer:
        data = await answer.read()
        return Answer(
            status=answer.status, headers=answer.headers, body=json.loads(data) if data else None
        )
