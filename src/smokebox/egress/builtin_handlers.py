"""Built-in handlers: credentials that the sandbox never sees, restrictions, and a log.

Combine several with `chain(log, bearer(env.TOKEN))`.
"""

from __future__ import annotations

import base64
import logging
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smokebox.egress.handler import (
    Handler,
    HandlerContext,
    Refused,
    check_handler,
    handler_name,
    run_handler,
)
from smokebox.egress.message import Request, Response
from smokebox.egress.urls import parse_url
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\x20-\x7e\x80-\xff\t]+")
_METHOD = re.compile(r"[A-Z]{1,32}")
_PATH = re.compile(r"/[^?#\s]*")
_EXAMPLES = {"methods": "['GET', 'POST']", "paths": "['/v1/']"}
# Headers by which some servers override the method of a request.
_OVERRIDES = frozenset({"x-http-method", "x-http-method-override", "x-method-override"})
_FRAMING = frozenset({"host", "connection", "content-length", "transfer-encoding", "te", "upgrade"})

_log = logging.getLogger("smokebox.egress")


class BuiltinHandler(ABC):
    """A handler whose name and repr show no secrets."""

    responds = False
    """True if it always returns a response, so that no handler can follow in a chain."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    @abstractmethod
    async def __call__(
        self, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Handle a request."""

    def __repr__(self) -> str:
        return f"<handler {self.__name__}>"


class _SetHeader(BuiltinHandler):
    def __init__(self, label: str, name: str, value: str) -> None:
        super().__init__(label)
        self._name = name
        self._value = value

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Request:
        request.headers[self._name] = self._value
        return request


def header(name: str, value: str) -> Handler:
    """Set a header, and replace one that the sandbox sends: `header("x-api-key", env.KEY)`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in _FRAMING:
        raise InvalidOption(
            f"header(): {name!r} is not a header that can be set.",
            hint="Use letters, digits and hyphens. Headers that frame a message cannot be set.",
            option="name",
            value=name,
        )
    return _SetHeader(f"header({name})", name, check_secret("header()", "value", value))


def bearer(token: str) -> Handler:
    """Send `Authorization: Bearer TOKEN`: `bearer(env.GITHUB_TOKEN)`."""
    return _SetHeader(
        "bearer", "authorization", f"Bearer {check_secret('bearer()', 'token', token)}"
    )


def basic(user: str, password: str) -> Handler:
    """Send a user name and a password, as HTTP Basic authentication."""
    name = check_secret("basic()", "user", user)
    if ":" in name:
        raise InvalidOption("basic(): a user name has no colon.", hint="Remove it.", option="user")
    pair = f"{name}:{check_secret('basic()', 'password', password)}"
    return _SetHeader("basic", "authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")


class _Restrict(BuiltinHandler):
    def __init__(self, methods: tuple[str, ...] | None, paths: tuple[str, ...] | None) -> None:
        super().__init__("restrict")
        self._methods = methods
        self._paths = paths

    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Request:
        if self._methods is not None:
            if request.method not in self._methods:
                raise Refused(f"{request.method} is not allowed, only {', '.join(self._methods)}")
            if override := _OVERRIDES & {str(name).lower() for name in request.headers}:
                raise Refused(f"the header {min(override)} could change the method")
        if self._paths is not None:
            try:
                path = parse_url(request.url).path
            except InvalidOption as error:
                raise Refused(error.message) from None
            if not any(_covers(prefix, path) for prefix in self._paths):
                raise Refused(f"{path} is not allowed, only {', '.join(self._paths)}")
        return request


def restrict(
    *, methods: Sequence[str] | None = None, paths: Sequence[str] | None = None
) -> Handler:
    """Refuse other methods and paths: `restrict(methods=["GET"], paths=["/repos/octo/"])`.

    A path covers what is below it, by whole segments: `/v1` covers `/v1` and `/v1/users`, and
    not `/v10`; `/v1/` covers only what is below. With `paths`, ambiguous URLs are refused, such
    as those with `..` or an encoded slash.
    """
    for option, values, form in (("methods", methods, _METHOD), ("paths", paths, _PATH)):
        if values is None:
            continue
        valid = isinstance(values, (list, tuple)) and values
        if not valid or not all(isinstance(one, str) and form.fullmatch(one) for one in values):
            raise InvalidOption(
                f"restrict(): {option} is a list such as {_EXAMPLES[option]}, not {values!r:.100}.",
                hint=f"Leave {option} out to allow all.",
                option=option,
                value=values,
            )
    return _Restrict(
        None if methods is None else tuple(methods), None if paths is None else tuple(paths)
    )


def _covers(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/")


async def log(request: Request, env: Any, context: HandlerContext) -> Request:
    """Log a line to the logger `smokebox.egress`, and send the request.

    Headers, query and body are left out: they may be secret.
    """
    parts = urlsplit(request.url)
    host = parts.netloc.rpartition("@")[2]
    url = f"{parts.scheme}://{host}{parts.path}"
    _log.info("sandbox %s: %s %s (%s)", context.sandbox_id, request.method, url, context.rule)
    return request


class _Chain(BuiltinHandler):
    def __init__(self, handlers: tuple[Handler, ...]) -> None:
        names = (str(handler_name(one)) for one in handlers)
        super().__init__(f"chain({', '.join(names)})")
        self._handlers = handlers
        self.responds = getattr(handlers[-1], "responds", False)

    async def __call__(
        self, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        for handler in self._handlers:
            result = await run_handler(handler, request, env, context)
            if isinstance(result, Response):
                return result
            request = result
        return request


def chain(*handlers: Handler) -> Handler:
    """Run handlers one after the other, until one responds or refuses.

    Each gets the request that the one before returned.
    """
    if not handlers:
        raise InvalidOption("chain() has no handler.", hint="Pass at least one.", option="handlers")
    for index, one in enumerate(handlers):
        if isinstance(one, str):
            raise InvalidOption(
                f"chain() takes functions, not {one!r}.",
                hint="Define the chain in a module on the server, and name that.",
                option="handlers",
                value=one,
            )
        check_handler("chain()", one)
        if getattr(one, "responds", False) and index + 1 < len(handlers):
            raise InvalidOption(
                f"chain(): nothing can come after {handler_name(one)}, which always responds.",
                hint="Put it last.",
                option="handlers",
            )
    return _Chain(handlers)


def check_secret(where: str, option: str, value: str | None) -> str:
    """Return a secret that a header can have. Raises `InvalidOption`, without the secret."""
    if value is None or value == "":
        raise InvalidOption(
            f"{where}: {option} is missing.",
            hint="Set the variable in the environment or .env; smokebox.env.NAME reports its name.",
            option=option,
        )
    if isinstance(value, str) and _VALUE.fullmatch(value) and value == value.strip():
        return value
    what = "text" if isinstance(value, str) else type(value).__name__
    raise InvalidOption(
        f"{where}: {option} is {what} that cannot be sent in a header.",
        hint="Strip line breaks and spaces around it.",
        option=option,
    )
