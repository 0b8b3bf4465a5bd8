"""What decides over a request that leaves a sandbox: a function in Python."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from smokebox.egress.message import Request, Response


class Refused(Exception):
    """A handler raises this to refuse a request; the sandbox gets 403 and the reason."""


class Context(Protocol):
    """What a handler knows besides the request."""

    @property
    def sandbox_id(self) -> str:
        """Which sandbox asks."""
        ...

    @property
    def rule(self) -> str:
        """The entry of the policy that led here, such as `outbound_by_host['*.example.com']`."""
        ...

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        """Send the request, and give the answer, whose body comes as it is read.

        `to` is the beginning of a URL, such as `http://127.0.0.1:8080`, to send it to
        instead of where it wanted; that one may be private.
        """
        ...


Handler: TypeAlias = Callable[[Request, Any, Context], Awaitable[Request | Response]]
"""Gets a request, `env` (where the secrets are) and a context.

It returns the request, edited or not, to have it sent; a `Response` to answer itself, which
may be one that `context.forward` gave; or raises `Refused`. Whatever else happens in it (an
error, nothing returned, no end) is an answer of 502 or 504, and nothing is sent.
"""

HandlerOption: TypeAlias = Handler | str
"""A handler, or `package.module:name` of one that the server imports."""
