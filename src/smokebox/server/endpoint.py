"""An endpoint of the API: a function, and what its signature says of the request.

`@endpoint("POST", "/sandboxes/{id}/exec")` on `async def run(call, body: Exec) -> ExecResult`
decodes the body, encodes what is returned, turns errors into answers, and is all that the
OpenAPI document is made from.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from smokebox.server.call import Call
from smokebox.server.decoding import decode_body, decode_query
from smokebox.server.patience import answer_patiently

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from smokebox.errors import SmokeboxError

Handler = Callable[..., Awaitable[Any]]
JSON = "application/json"
BYTES = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path; an ASGI app once `door` has said who asks.

    `takes` and `gives` are media types. `finds` says that the sandbox must be there, `admin`
    and `public` who may ask; a `slow` one may take long: it lives while its caller listens,
    and is told to wait.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    description: str
    body: type | None
    query: type | None
    answer: Any
    takes: str
    gives: str
    status: int
    errors: tuple[type[SmokeboxError], ...]
    finds: bool
    admin: bool
    public: bool
    slow: bool

    @property
    def name(self) -> str:
        """What the function is called: unique, for programs."""
        return f"{self.handler.__module__.rpartition('.')[2]}_{self.handler.__name__}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors are for `door` to answer."""
        request = Request(scope, receive)
        call = Call(request, scope["smokebox.state"], scope["smokebox.principal"])
        if self.admin:
            call.principal.check_admin()
        arguments: dict[str, Any] = {}
        if self.query is not None:
            arguments["query"] = decode_query(self.query, scope["query_string"])
        if self.body is not None:
            arguments["body"] = decode_body(self.body, request.headers, await call.body())
        if self.finds:
            await call.find()
        if self.slow:
            work = functools.partial(self.handler, call, **arguments)
            await answer_patiently(scope, receive, send, work, self.respond)
            return
        response = self.respond(await self.handler(call, **arguments))
        await response(scope, receive, send)

    def respond(self, value: Any) -> Response:
        """The answer that a handler's value is."""
        if isinstance(value, Response):
            return value
        if value is None:
            return Response(status_code=204)
        return Response(msgspec.json.encode(value), status_code=self.status, media_type=JSON)


def endpoint(
    method: str,
    path: str,
    *,
    errors: tuple[type[SmokeboxError], ...] = (),
    takes: str = JSON,
    gives: str = JSON,
    status: int = 200,
    finds: bool | None = None,
    admin: bool = False,
    public: bool = False,
    slow: bool = False,
) -> Callable[[Handler], Endpoint]:
    """Make a function an `Endpoint`. Its docstring is what the document says of it."""

    def make(handler: Handler) -> Endpoint:
        hints = get_type_hints(handler, include_extras=True)
        summary, _, description = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")
        answer = hints.get("return")
        nothing = answer is None or answer is type(None)
        return Endpoint(
            method=method,
            path=path,
            handler=handler,
            summary=" ".join(summary.split()),
            description=" ".join(description.split()),
            body=hints.get("body"),
            query=hints.get("query"),
            answer=None if nothing or _is_response(answer) else answer,
            takes=takes,
            gives=gives,
            status=204 if nothing and gives == JSON else status,
            errors=errors,
            finds="{id}" in path if finds is None else finds,
            admin=admin,
            public=public,
            slow=slow,
        )

    return make


def _is_response(answer: object) -> bool:
    kind = get_origin(answer) or answer
    return isinstance(kind, type) and issubclass(kind, Response)
