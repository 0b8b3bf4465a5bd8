"""Requests to an app: authorization, decoding and responses."""

from __future__ import annotations

import hmac
import logging
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from smokebox.app.inbox import check_conversation_id
from smokebox.errors import InvalidOption, SmokeboxError, Unauthorized
from smokebox.foundation.ids import new_global_id
from smokebox.wire.codec import whole
from smokebox.wire.failure import Failure, FailureResponse, failure_of, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from smokebox.app.app import App
    from smokebox.app.definitions import Trigger

T = TypeVar("T")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_MAX_WAIT = 60.0

_log = logging.getLogger("smokebox.app")


class AppRequest:
    """A request to an endpoint, with the app that serves it."""

    def __init__(self, app: App, http: Request) -> None:
        self.app = app
        self.http = http

    def path_param(self, name: str) -> str:
        """Return a path parameter."""
        return str(self.http.path_params[name])

    @property
    def id(self) -> str:
        """The id in the path. Raises `InvalidOption`."""
        return check_conversation_id(self.path_param("id"))

    async def body(self) -> bytes:
        """Read the whole body, up to the app's limit."""
        limit = self.app.project.settings.max_body
        hint = "Send a smaller body, or raise max_body in [app] of smokebox.toml."
        return await whole(self.http.stream(), limit, hint=hint)

    async def decode(self, kind: type[T], *, optional: bool = False) -> T:
        """Decode the body. Raises `InvalidOption` with the name of the field."""
        data = await self.body()
        return decode(kind, b"{}" if optional and not data else data)

    def check_key(self) -> None:
        """Raise `Unauthorized` if the app has keys and the request has none of them."""
        keys = self.app.keys
        token = self.http.headers.get("authorization", "").removeprefix("Bearer ").encode()
        # Every key is compared, so that the response time reveals nothing.
        if keys and not any([hmac.compare_digest(token, key.encode()) for key in keys]):
            raise Unauthorized(
                "this app requires a key.",
                hint="Send `Authorization: Bearer KEY` with one of SMOKEBOX_APP_KEYS.",
            )

    def verify(self, trigger: Trigger, body: bytes) -> str | None:
        """Check the signature, if the trigger requires one, and return the delivery's id."""
        if trigger.signature is None:
            return None
        secret = getattr(self.app.secrets, trigger.signature.secret)
        return trigger.signature.check(self.http.headers, body, secret)

    @property
    def idempotency_key(self) -> str | None:
        """The Idempotency-Key header. Raises `InvalidOption`."""
        key = self.http.headers.get("idempotency-key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise InvalidOption(
                "Idempotency-Key must be 1 to 200 visible ASCII characters.",
                hint="Send a UUID, for example.",
                option="Idempotency-Key",
            )
        return key

    def seconds(self, name: str) -> float | None:
        """Return a number of seconds from the query."""
        text = self.http.query_params.get(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= _MAX_WAIT:
            raise InvalidOption(
                f"{name} must be seconds from 0 to {_MAX_WAIT:g}, not {text!r:.80}.",
                hint="Repeat the request to wait longer.",
                option=name,
                value=text,
            )
        return value

    def url(self, path: str) -> str:
        """Return the URL of a path of this app, with the prefix it is mounted at."""
        root = self.http.scope.get("root_path", "")
        return f"{root}{path}"


def endpoint(
    app: App,
    method: str,
    path: str,
    serve: Callable[[AppRequest], Awaitable[Response]],
    *,
    guarded: bool = True,
) -> Route:
    """Return a route. A `guarded` one requires a key."""

    async def handle(http: Request) -> Response:
        request = AppRequest(app, http)
        try:
            if guarded:
                request.check_key()
            await app.start()
            return await serve(request)
        except SmokeboxError as error:
            return error_response(failure_of(error), status_of(type(error)))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            id = new_global_id()
            _log.exception("unexpected error in request %s", id)
            failure = Failure(code="error", message="internal error.", request_id=id)
            return error_response(failure, 500)

    return Route(path, handle, methods=[method])


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as a JSON response."""
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )


def error_response(failure: Failure, status: int) -> Response:
    """Return an error as a JSON response."""
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return json_response(FailureResponse(failure), status, headers)


def decode(kind: type[T], data: bytes) -> T:
    """Decode JSON. Raises `InvalidOption`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidOption(
            f"invalid request body: {error}.",
            hint="Fix that field.",
            option="body",
        ) from None
    except RecursionError:
        raise InvalidOption(
            "the request body is nested too deeply.",
            hint="Send a flatter document.",
            option="body",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"the request body is not JSON: {error}.",
            hint="Send a JSON document as application/json.",
            option="body",
        ) from None
