"""Endpoints of the API: functions whose signatures declare the request and the response.

`@endpoint("POST", "/sandboxes/{id}/exec")` on `async def run(call, body: Exec) -> ExecResult`
decodes the body, encodes the result and turns errors into responses. The OpenAPI document is
generated from these declarations and the docstrings alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from smokebox.egress.policy import moved_options
from smokebox.engine.names import check_id
from smokebox.errors import InvalidOption, NotFound
from smokebox.options import refuse_unknown
from smokebox.server.responses import json_response, respond_with_keepalive
from smokebox.tenancy.scopes import READ, WRITE
from smokebox.wire.codec import decode, whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.datastructures import Headers
    from starlette.types import Receive, Scope, Send

    from smokebox.egress.address_guard import PrivateAccess
    from smokebox.engine import Host, Sandbox
    from smokebox.errors import SmokeboxError
    from smokebox.server.state import ServerState
    from smokebox.tenancy.principal import Principal

Handler = Callable[..., Coroutine[Any, Any, Any]]
JSON = "application/json"
BYTES = "application/octet-stream"
SAFE = ("GET", "HEAD")
"""Methods that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """One method of one path; an ASGI app behind the request guard.

    Attributes:
        body: Type of the JSON body, or `bytes` for another media type, read whole.
        accepts, returns: Media types of the request and of the response.
        needs_sandbox: The sandbox in the path must exist.
        admin: Requires an administrator's key.
        reads: Changes nothing, so that the scope to read is enough.
        public: Needs no key.
        slow: Cancelled when the client disconnects, and keeps the connection alive meanwhile.
    """

    method: str
    path: str
    handler: Handler
    body: type | None
    query: type | None
    response: Any
    accepts: str
    returns: str
    status: int
    errors: tuple[type[SmokeboxError], ...]
    needs_sandbox: bool
    admin: bool
    reads: bool
    public: bool
    slow: bool

    @property
    def name(self) -> str:
        """The unique operation id of the endpoint."""
        return f"{self.handler.__module__.rpartition('.')[2]}_{self.handler.__name__}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. The request guard turns errors into responses."""
        request = Request(scope, receive)
        call = ApiCall(request, scope["smokebox.state"], scope["smokebox.principal"])
        if self.admin:
            call.principal.check_admin()
        elif not self.public:
            call.principal.check_scope(f"sandboxes:{READ if self.reads else WRITE}")
        if "{id}" in self.path:
            # Before anything of the request is read, so that every route of a sandbox has it.
            call.principal.check_sandbox(check_id(call.path_param("id")))
        arguments: dict[str, Any] = {}
        if self.query is not None:
            arguments["query"] = decode_query(self.query, scope["query_string"])
        if self.body is not None:
            data = await call.body()
            raw = self.body is bytes
            arguments["body"] = data if raw else decode_body(self.body, request.headers, data)
        if self.needs_sandbox:
            await call.find_sandbox()
        if self.slow:
            work = self.handler(call, **arguments)
            await respond_with_keepalive(scope, receive, send, work, self.respond)
            return
        response = self.respond(await self.handler(call, **arguments))
        await response(scope, receive, send)

    def respond(self, value: Any) -> Response:
        """Turn the value of a handler into a response."""
        if isinstance(value, Response):
            return value
        if value is None:
            return Response(status_code=204)
        return json_response(value, self.status)


def endpoint(
    method: str,
    path: str,
    *,
    errors: tuple[type[SmokeboxError], ...] = (),
    accepts: str = JSON,
    returns: str = JSON,
    status: int = 200,
    needs_sandbox: bool | None = None,
    admin: bool = False,
    reads: bool | None = None,
    public: bool = False,
    slow: bool = False,
) -> Callable[[Handler], ApiEndpoint]:
    """Make a function an `ApiEndpoint`. Its docstring describes it in the OpenAPI document."""

    def make(handler: Handler) -> ApiEndpoint:
        hints = get_type_hints(handler, include_extras=True)
        response = hints.get("return")
        nothing = response is None or response is type(None)
        return ApiEndpoint(
            method=method,
            path=path,
            handler=handler,
            body=hints.get("body"),
            query=hints.get("query"),
            response=None if nothing or _is_response(response) else response,
            accepts=accepts,
            returns=returns,
            status=204 if nothing and returns == JSON else status,
            errors=errors,
            needs_sandbox="{id}" in path if needs_sandbox is None else needs_sandbox,
            admin=admin,
            reads=method in SAFE if reads is None else reads,
            public=public,
            slow=slow,
        )

    return make


def _is_response(hint: object) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Response)


class ApiCall:
    """A request to an endpoint. `sandbox` is set if the path names one."""

    sandbox: Sandbox

    def __init__(self, request: Request, state: ServerState, principal: Principal) -> None:
        self.request = request
        self.state = state
        self.principal = principal

    @property
    def host(self) -> Host:
        """The engine."""
        return self.state.host

    @property
    def request_id(self) -> str:
        """The id of this request in logs and errors."""
        return str(self.request.scope["smokebox.request_id"])

    @property
    def private_access(self) -> PrivateAccess:
        """Private addresses that the server may connect to for this principal."""
        profile = self.principal.profile
        granted = () if profile is None else profile.private
        return self.principal.admin or (*self.state.settings.private_networks, *granted)

    def path_param(self, name: str) -> str:
        """Return a parameter of the path."""
        return str(self.request.path_params[name])

    async def find_sandbox(self) -> None:
        """Check that the sandbox in the path exists and that the key may use it."""
        id = check_id(self.path_param("id"))
        self.principal.check_sandbox(id)
        self.sandbox = self.host.sandbox(id)
        if self.sandbox.lifecycle.run is None and await self.sandbox.info() is None:
            raise sandbox_not_found(id)

    async def body(self) -> bytes:
        """Read the whole body of a small request."""
        limit = self.state.settings.max_body
        hint = "Write long content to a file first: files have no limit."
        return await whole(self.request.stream(), limit, hint=hint)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield a body of any length as it arrives."""
        async for chunk in self.request.stream():
            if chunk:
                yield chunk


def sandbox_not_found(id: str) -> NotFound:
    """Return the error for a sandbox that does not exist."""
    return NotFound(
        f"there is no sandbox {id!r}.",
        hint=f"Create it with PUT /api/sandboxes/{id}, or `smokebox create {id}`.",
        kind="sandbox",
        name=id,
    )


T = TypeVar("T")

_repeatable_fields: dict[type, frozenset[str]] = {}

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`(?: - at `\$(.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_AT = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)


def decode_body(kind: type[T], headers: Headers, data: bytes) -> T:
    """Decode a JSON body. An empty one counts as an empty object."""
    media = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # A foreign web page can send other media types without a CORS preflight.
    if data and media != "application/json":
        raise InvalidOption(
            f"the body of this request is {media!r}, not 'application/json'.",
            hint="Set the header Content-Type: application/json.",
            option="content-type",
            value=media,
        )
    try:
        return decode(kind, data or b"{}")
    except msgspec.ValidationError as error:
        raise _explain(error, kind, "the body") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"the body of this request is not JSON: {error}.",
            hint="Send a JSON object.",
            option="body",
        ) from error


def decode_query(kind: type[T], query: bytes) -> T:
    """Decode the query of a URL."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise InvalidOption(
            f"the query is not text: {error}.",
            hint="Rename such a file with a command (`mv`), and use its new name.",
            option="query",
            value=query.decode("latin-1"),
        ) from error
    fields: dict[str, Any] = {}
    repeatable = _repeatable(kind)
    for name, value in pairs:
        if name in repeatable:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise InvalidOption(
                f"{name} is in the query more than once.",
                hint="Send it once.",
                option=name,
                value=value,
            )
        else:
            fields[name] = value
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(error, kind, "the query") from error


def _repeatable(kind: type) -> frozenset[str]:
    """Return the fields that are lists, and may be repeated in a query."""
    if kind not in _repeatable_fields:
        _repeatable_fields[kind] = frozenset(
            name
            for name, hint in get_type_hints(kind).items()
            if any(get_origin(part) is list for part in (hint, *get_args(hint)))
        )
    return _repeatable_fields[kind]


def _explain(error: msgspec.ValidationError, kind: type, where: str) -> InvalidOption:
    text = str(error)
    if (unknown := _UNKNOWN.fullmatch(text)) and not unknown[2]:
        known = get_type_hints(kind)
        moved = moved_options('{{"egress": {{"{name}": ...}}}}') if "egress" in known else None
        try:
            refuse_unknown(where, [unknown[1]], known, moved)
        except InvalidOption as better:
            return better
    if missing := _MISSING.match(text):
        return InvalidOption(
            f"{where} has no field {missing[1]!r}.",
            hint="Add it.",
            option=missing[1],
            value=None,
        )
    found = _AT.fullmatch(text)
    what, field = (found[1], found[2]) if found else (text, "")
    return InvalidOption(
        f"{field or where}: {what[:1].lower()}{what[1:]}.",
        hint="See /api/openapi.json for its fields.",
        option=field or where,
    )
