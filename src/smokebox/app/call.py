"""One request on its way to an endpoint of an app: let in, read, answered or refused."""

from __future__ import annotations

import hmac
import logging
import re
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from smokebox.app.submission import check_conversation_id
from smokebox.errors import InvalidOption, SmokeboxError, Unauthorized
from smokebox.wire.codec import whole
from smokebox.wire.failure import Failure, FailureAnswer, failure_of, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from smokebox.app.app import App
    from smokebox.app.served import Trigger

T = TypeVar("T")
_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_LONGEST_WAIT = 60.0

_log = logging.getLogger("smokebox.app")


class Call:
    """What an endpoint gets."""

    def __init__(self, app: App, request: Request) -> None:
        self.app = app
        self.request = request

    def part(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    @property
    def id(self) -> str:
        """The id in the path. Raises `InvalidOption`."""
        return check_conversation_id(self.part("id"))

    async def body(self) -> bytes:
        """The whole body, up to what the app takes."""
        limit = self.app.project.settings.max_body
        hint = "Send less, or raise max_body in [app] of smokebox.toml."
        return await whole(self.request.stream(), limit, hint=hint)

    async def decoded(self, kind: type[T], *, optional: bool = False) -> T:
        """The body as what it should be. Raises `InvalidOption` with the name of the field."""
        data = await self.body()
        return decoded(kind, b"{}" if optional and not data else data)

    def let_in(self) -> None:
        """Raise `Unauthorized` unless who asks has a key of the app, if it has any."""
        keys = self.app.keys
        given = self.request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        # Each is compared, so that the time tells nothing.
        if keys and not any([hmac.compare_digest(given, key.encode()) for key in keys]):
            raise Unauthorized(
                "this app wants a key.",
                hint="Send it as `Authorization: Bearer KEY`; SMOKEBOX_APP_KEYS has them.",
            )

    def verify(self, trigger: Trigger, body: bytes) -> str | None:
        """Let in whoever signed, where that is asked for; gives the id of a signed delivery."""
        if trigger.signature is None:
            return None
        secret = getattr(self.app.secrets, trigger.signature.secret)
        return trigger.signature.check(self.request.headers, body, secret)

    @property
    def idempotency_key(self) -> str | None:
        """What makes the same request sent twice one."""
        key = self.request.headers.get("idempotency-key")
        if key is not None and not _KEY.fullmatch(key):
            raise InvalidOption(
                "Idempotency-Key is up to 200 visible ASCII characters.",
                hint="Send for example a UUID.",
                option="Idempotency-Key",
            )
        return key

    def seconds(self, name: str) -> float | None:
        """A time to wait, of the query."""
        text = self.request.query_params.get(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= _LONGEST_WAIT:
            raise InvalidOption(
                f"{name} is seconds, up to {_LONGEST_WAIT:g}, not {text!r:.80}.",
                hint="Ask again after that time.",
                option=name,
                value=text,
            )
        return value

    def url(self, path: str) -> str:
        """The URL of something of this app, wherever that is mounted."""
        root = self.request.scope.get("root_path", "")
        return f"{root}{path}"


def endpoint(
    app: App,
    method: str,
    path: str,
    serve: Callable[[Call], Awaitable[Response]],
    *,
    guarded: bool = True,
) -> Route:
    """A route. `guarded` is one that only who has a key may ask."""

    async def answer_or_refuse(request: Request) -> Response:
        call = Call(app, request)
        try:
            if guarded:
                call.let_in()
            await app.start()
            return await serve(call)
        except SmokeboxError as error:
            return refusal(failure_of(error), status_of(type(error)))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            id = uuid4().hex
            _log.exception("a defect answered a request: %s", id)
            failure = Failure(code="error", message="the app has a defect.", request_id=id)
            return refusal(failure, 500)

    return Route(path, answer_or_refuse, methods=[method])


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )


def refusal(failure: Failure, status: int) -> Response:
    """An error as JSON."""
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return answer(FailureAnswer(failure), status, headers)


def decoded(kind: type[T], data: bytes) -> T:
    """JSON as what it should be. Raises `InvalidOption`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidOption(
            f"the body of this request is not what it should be: {error}.",
            hint="Mend that field.",
            option="body",
        ) from None
    except RecursionError:
        raise InvalidOption(
            "the body of this request is nested too deeply.",
            hint="Send a flatter document.",
            option="body",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"the body of this request is not JSON: {error}.",
            hint="Send a JSON document, as application/json.",
            option="body",
        ) from None
