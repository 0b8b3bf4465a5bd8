"""A request on its way out of a sandbox, and the answer to it, as a handler sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any, TypeAlias

from multidict import CIMultiDict

from smokebox.errors import RequestTooLarge

Content: TypeAlias = bytes | str | AsyncIterable[bytes]
"""A body: all of it, or pieces as they come."""

MOST_READ = 64 * 1024 * 1024


class MessageBody:
    """The bytes of a message, as they come; read once, or kept by `read`."""

    def __init__(self, content: Content | None) -> None:
        self._content: Content = b"" if content is None else content
        self._taken = False

    @property
    def known(self) -> bytes | None:
        """All of it, where that is here already."""
        content = self._content
        if isinstance(content, str):
            return content.encode()
        return content if isinstance(content, bytes) else None

    @property
    def untouched(self) -> bool:
        """Whether nobody has read any of it."""
        return not self._taken

    async def read(self, limit: int = MOST_READ) -> bytes:
        """All of it, which is kept. Raises `RequestTooLarge` above `limit`."""
        if (known := self.known) is not None:
            return known
        kept = bytearray()
        async for piece in self:
            kept += piece
            if len(kept) > limit:
                raise RequestTooLarge(
                    f"the body has more than {limit} bytes.",
                    hint="Pass it on as it comes, or read it with a higher limit.",
                    limit=limit,
                )
        self._content, self._taken = bytes(kept), False
        return self._content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if (known := self.known) is not None:
            if known:
                yield known
            return
        assert not isinstance(self._content, (bytes, str))
        self._taken = True
        pieces = aiter(self._content)
        try:
            async for piece in pieces:
                yield piece
        finally:
            # Whoever stops reading is done with it, and not only when it is garbage.
            if (close := getattr(pieces, "aclose", None)) is not None:
                await close()


def _as_body(content: Content | MessageBody | None) -> MessageBody:
    """A body as it is, so that one that was not read is known for the same."""
    return content if isinstance(content, MessageBody) else MessageBody(content)


class _Message:
    headers: CIMultiDict[str]
    body: MessageBody

    async def read(self) -> bytes:
        """The whole body, up to 64 MiB; it can be passed on afterwards."""
        return await self.body.read()

    async def text(self) -> str:
        """The whole body as text."""
        return (await self.read()).decode(errors="replace")

    async def json(self) -> Any:
        """The whole body, as JSON."""
        return json.loads(await self.read())


class Request(_Message):
    """What a program in the sandbox asks for. Edit it, and return it to have it sent.

    `url` is absolute; its host is the one that was judged by the policy.
    """

    def __init__(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | CIMultiDict[str] | None = None,
        body: Content | MessageBody | None = None,
    ) -> None:
        self.method = method
        self.url = url
        self.headers = CIMultiDict(headers or {})
        self.body = _as_body(body)

    def __repr__(self) -> str:
        # Never the headers: this is what logs show.
        return f"<Request {self.method} {self.url}>"


class Response(_Message):
    """What the program in the sandbox gets for an answer."""

    def __init__(
        self,
        body: Content | MessageBody | None = None,
        status: int = 200,
        headers: Mapping[str, str] | CIMultiDict[str] | None = None,
    ) -> None:
        self.status = status
        self.headers = CIMultiDict(headers or {})
        self.body = _as_body(body)

    @classmethod
    def of_json(cls, value: object, status: int = 200) -> Response:
        """An answer in JSON."""
        return cls(json.dumps(value), status, {"content-type": "application/json"})

    def __repr__(self) -> str:
        return f"<Response {self.status}>"
