"""Routes of the bridge protocol: handlers whose signatures declare the request and the response.

The OpenAPI document is generated from these routes and the docstrings alone.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from smokebox.errors import SmokeboxError
from smokebox.server.compat.bridge.errors import BridgeError, bridge_error
from smokebox.server.endpoint import JSON, SAFE, ApiCall
from smokebox.tenancy.scopes import READ, WRITE

T = TypeVar("T", bound=msgspec.Struct)
BridgeHandler = Callable[..., Awaitable[Any]]


class Ok(msgspec.Struct):
    """The response of an operation that has no result."""

    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeRoute:
    """One method of one path.

    Attributes:
        operation: Operation id that the protocol defines.
        accepts, returns: Media types of the request and of the response.
        errors: Statuses of errors besides those that every request can have.
        session: Takes the header `Session-Id`.
        public: Needs no key.
        reads: Changes nothing, so that the scope to read is enough.
    """

    method: str
    path: str
    operation: str
    handler: BridgeHandler
    body: type | None
    query: type | None
    response: type | None
    accepts: str
    returns: str
    status: int
    errors: tuple[int, ...]
    session: bool
    public: bool
    reads: bool

    async def respond(self, request: Request) -> Response:
        """Handle a request."""
        scope = request.scope
        call = ApiCall(request, scope["smokebox.state"], scope["smokebox.principal"])
        try:
            call.principal.check_scope(f"sandboxes:{READ if self.reads else WRITE}")
            arguments: dict[str, Any] = {}
            if self.query is not None:
                arguments["query"] = decode_query(self.query, request.query_params)
            if self.body is not None:
                arguments["body"] = _decode_body(self.body, await call.body())
            value = await self.handler(call, **arguments)
        except BridgeError as refusal:
            return refusal.response
        except SmokeboxError as error:
            return bridge_error(error).response
        if isinstance(value, Response):
            return value
        if value is None:
            return Response(status_code=self.status)
        return Response(msgspec.json.encode(value), self.status, media_type=JSON)

    def starlette_route(self) -> Route:
        """Make the route that a router takes."""

        # Starlette takes a bound method for a class-based ASGI app.
        async def endpoint(request: Request) -> Response:
            return await self.respond(request)

        route = Route(self.path, endpoint, methods=[self.method], include_in_schema=False)
        # The name of a file may have line breaks.
        route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
        return route


def bridge_route(
    method: str,
    path: str,
    operation: str,
    *,
    errors: tuple[int, ...] = (),
    accepts: str = JSON,
    returns: str = JSON,
    status: int = 200,
    session: bool = False,
    public: bool = False,
    reads: bool | None = None,
) -> Callable[[BridgeHandler], BridgeRoute]:
    """Make a function a `BridgeRoute`. Its docstring describes it in the OpenAPI document."""

    def make(handler: BridgeHandler) -> BridgeRoute:
        hints = get_type_hints(handler)
        response = hints.get("return")
        plain = response in (None, type(None)) or issubclass(response, Response)
        return BridgeRoute(
            method=method,
            path=path,
            operation=operation,
            handler=handler,
            body=hints.get("body"),
            query=hints.get("query"),
            response=None if plain else response,
            accepts=accepts,
            returns=returns,
            status=status,
            errors=errors,
            session=session,
            public=public,
            reads=method in SAFE if reads is None else reads,
        )

    return make


def decode_query(kind: type[T], query: Any) -> T:
    """Decode the query of a URL; empty values count as absent, unknown ones are ignored."""
    fields = {name: value for name, value in query.items() if value}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BridgeError(400, f"Invalid query: {error}") from error


def _decode_body(kind: type[T], data: bytes) -> T:
    """Decode a body of JSON, ignoring unknown fields: they are meant for other servers."""
    if not data and not any(field.required for field in msgspec.structs.fields(kind)):
        return kind()
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise BridgeError(400, f"Invalid body: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BridgeError(400, "Invalid JSON body") from error
