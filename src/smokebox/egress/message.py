"""HTTP requests and responses as egress handlers see them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any, TypeAlias

from multidict import CIMultiDict

from smokebox.errors import RequestTooLarge

Content: TypeAlias = bytes | str | AsyncIterable[bytes]
"""A whole body, or pieces as they arrive."""

MAX_READ = 64 * 1024 * 1024


class MessageBody:
    """The body of a message, which arrives in pieces. Iterate over it once, or `read` it."""

    def __init__(self, content: Content | None) -> None:
        self._content: Content = b"" if content is None else content
        self._taken = False

    @property
    def data(self) -> bytes | None:
        """The whole body if it is in memory, else None."""
        content = self._content
        if isinstance(content, str):
            return content.encode()
        return content if isinstance(content, bytes) else None

    @property
    def unread(self) -> bool:
        """True if reading has not started."""
        return not self._taken

    async def read(self, limit: int = MAX_READ) -> bytes:
        """Read and keep the whole body. Raises `RequestTooLarge` above `limit`."""
        if (data := self.data) is not None:
            return data
        kept = bytearray()
        async for piece in self:
            kept += piece
            if len(kept) > limit:
                raise RequestTooLarge(
                    f"the body has more than {limit} bytes.",
                    hint="Pass it on without reading it, or read it with a higher limit.",
                    limit=limit,
                )
        self._content, self._taken = bytes(kept), False
        return self._content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if (data := self.data) is not None:
            if data:
                yield data
            return
        assert not isinstance(self._content, (bytes, str))
        self._taken = True
        pieces = aiter(self._content)
        try:
            async for piece in pieces:
                yield piece
        finally:
            # A reader that stops early closes the source now, not when it is garbage.
            if (close := getattr(pieces, "aclose", None)) is not None:
                await close()


def _as_body(content: Content | MessageBody | None) -> MessageBody:
    # The same object, so that a proxy recognizes a body that it passed in.
    return content if isinstance(content, MessageBody) else MessageBody(content)


class _Message:
    headers: CIMultiDict[str]
    body: MessageBody

    async def read(self) -> bytes:
        """Read the whole body, up to 64 MiB; it can be passed on afterwards."""
        return await self.body.read()

    async def text(self) -> str:
        """Read the whole body as text."""
        return (await self.read()).decode(errors="replace")

    async def json(self) -> Any:
        """Read the whole body as JSON."""
        return json.loads(await self.read())


class Request(_Message):
    """A request from the sandbox. Edit it, and return it to send it.

    `url` is absolute; its host is the one that the policy was checked for.
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
        # Without headers, which may have secrets: logs show this.
        return f"<Request {self.method} {self.url}>"


class Response(_Message):
    """A response to the sandbox."""

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
        """Return a response with a JSON body."""
        return cls(json.dumps(value), status, {"content-type": "application/json"})

    def __repr__(self) -> str:
        return f"<Response {self.status}>"
