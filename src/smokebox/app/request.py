"""Requests to an app: authorization, decoding and responses."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response

from smokebox.app.inbox import check_conversation_id
from smokebox.errors import InvalidOption
from smokebox.tenancy.peer import PEER
from smokebox.tenancy.principal import ANONYMOUS
from smokebox.wire.codec import whole
from smokebox.wire.failure import Failure, FailureResponse

if TYPE_CHECKING:
    import contextlib

    from starlette.requests import Request

    from smokebox.app.app import App
    from smokebox.app.definitions import Trigger
    from smokebox.app.endpoint import AppEndpoint
    from smokebox.app.webhook import Delivery
    from smokebox.tenancy.running_requests import RunningRequest

T = TypeVar("T")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_MAX_WAIT = 60.0


class AppRequest:
    """A request to an endpoint, with the app that serves it.

    `principal` is its sender, once that is known: `ANONYMOUS` for a webhook.

    Args:
        running: The request, which ends when the key of its sender does.
        held: What is released when the response has been sent.
    """

    def __init__(
        self,
        app: App,
        http: Request,
        endpoint: AppEndpoint,
        running: RunningRequest,
        held: contextlib.ExitStack,
    ) -> None:
        self.app = app
        self.http = http
        self.principal = ANONYMOUS
        self._endpoint = endpoint
        self._running = running
        self._held = held

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

    def authenticate(self) -> None:
        """Find out who sends the request, and count it towards the limits of that key.

        Raises:
            Unauthorized: The key is missing or not valid.
            Forbidden: The key has not the scope, or is for other ids.
            LimitReached: The key sends too many requests.
        """
        app, headers = self.app, self.http.headers
        authorization = headers.get("authorization")
        encoded = None if authorization is None else authorization.encode("latin-1")
        principal = app.keys.principal(encoded, self.http.scope.get(PEER))
        if not principal.scopes.intersection(self._endpoint.scopes):
            principal.check_scope(self._endpoint.scopes[0])
        if self._endpoint.id_kind:
            principal.check_id(self._endpoint.id_kind, self.path_param("id"))
        usage = app.rate_limiter.acquire(principal, by_socket=False)
        if usage is not None:
            self._held.callback(usage.end)
        self._held.enter_context(app.running.hold(principal.id, self._running))
        self.principal = principal

    def verify(self, trigger: Trigger, body: bytes) -> Delivery | None:
        """Check the signature, if the trigger requires one, and return the delivery."""
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


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as a JSON response."""
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )


def error_response(failure: Failure, status: int) -> Response:
    """Return an error as a JSON response."""
    headers = {}
    if status == 401:
        sent = failure.fields.get("reason") not in ("missing", "peer")
        headers["www-authenticate"] = 'Bearer error="invalid_token"' if sent else "Bearer"
    if status in (429, 503):
        headers["retry-after"] = str(math.ceil(float(failure.fields.get("retry_after") or 1)))
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
        raise nested_too_deeply() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"the request body is not JSON: {error}.",
            hint="Send a JSON document as application/json.",
            option="body",
        ) from None


def nested_too_deeply() -> InvalidOption:
    """Return the error for JSON that is nested too deeply."""
    return InvalidOption(
        "the request body is nested too deeply.", hint="Send a flatter document.", option="body"
    )
