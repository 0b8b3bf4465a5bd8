"""What decides over a request that leaves a sandbox: a function in Python."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.egress.message import Request, Response


CLIENT = "@client"
"""Stands for a handler that the client of a sandbox has in its own process."""


class Refused(Exception):
    """A handler raises this to refuse a request; the sandbox gets 403 and the reason."""


class HandlerFailed(Exception):
    """A handler elsewhere has failed; `kind` says with what, and nothing that it held."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the handler failed with {kind}")
        self.kind = kind


class HandlerContext(Protocol):
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


Made: TypeAlias = "Request | Response"
Handler: TypeAlias = "Callable[[Request, Any, HandlerContext], Awaitable[Made] | Made]"
"""Gets a request, `env` (where the secrets are) and a context; async, or a plain function
that does not take long.

It returns the request, edited or not, to have it sent; a `Response` to answer itself, which
may be one that `context.forward` gave; or raises `Refused`. Whatever else happens in it (an
error, nothing returned, no end) is an answer of 502 or 504, and nothing is sent.
"""

HandlerOption: TypeAlias = "Handler | str"
"""A handler, or `package.module:name` of one that the server imports."""


async def run_handler(
    handler: Handler, request: Request, env: object, context: HandlerContext
) -> Request | Response:
    """What a handler makes of a request. A plain function will do, too.

    Raises whatever it raises, and TypeError for what is neither a request nor a response.
    """
    # Every engine imports this file, and few sandboxes have a handler.
    from smokebox.egress.message import Request, Response

    made: object = handler(request, env, context)
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, (Request, Response)):
        return made
    raise TypeError(f"it returned {type(made).__name__}, and neither a Request nor a Response")


def check_handler(option: str, handler: object) -> None:
    """Raise `InvalidOption` for what cannot be a handler."""
    hint = "Write `async def handler(request, env, context)`; see docs/network.md."
    if callable(handler):
        if not _takes_three(handler):
            name = handler_name(handler)
            raise InvalidOption(
                f"{option}: {name} does not take (request, env, context).",
                hint=f"Did you mean {name}(...)? Or w{hint[1:]}",
                option=option,
                value=name,
            )
        return
    if isinstance(handler, str):
        module, colon, name = handler.partition(":")
        dotted = [*module.split("."), *name.split(".")]
        if handler == CLIENT or (colon and all(part.isidentifier() for part in dotted)):
            return
    raise InvalidOption(
        f"{option} is a function, or 'package.module:name' of one on the server, "
        f"not {handler!r:.200}.",
        hint=hint,
        option=option,
        value=handler,
    )


def handler_name(handler: HandlerOption | None) -> str | None:
    """What a handler is called in logs; never what it holds."""
    if handler is None or isinstance(handler, str):
        return handler
    name = getattr(handler, "__qualname__", None) or getattr(handler, "__name__", None)
    return str(name or type(handler).__qualname__)


def _takes_three(handler: Callable[..., object]) -> bool:
    try:
        inspect.signature(handler).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:
        return True  # It has no signature that could be seen, as some that are written in C.
    return True


def find_handler(handler: HandlerOption) -> Handler:
    """A handler itself, or the one that is imported from where it is said to be.

    Raises `InvalidOption` where there is none.
    """
    return _load(handler) if isinstance(handler, str) else handler


@functools.lru_cache(256)
def _load(path: str) -> Handler:
    check_handler("handler", path)
    module, _, names = path.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise InvalidOption(
            f"there is no handler {path!r}: {error}.",
            hint="It is imported by the server, from where the server's Python finds modules.",
            option="handler",
            value=path,
        ) from error
    except Exception as error:
        raise InvalidOption(
            f"the module of the handler {path!r} cannot be imported: {type(error).__name__}.",
            hint=f"Try it where the server runs: python -c 'import {module}'.",
            option="handler",
            value=path,
        ) from error
    if not callable(found):
        raise InvalidOption(
            f"{path!r} is {type(found).__name__}, and no handler.",
            hint="Write `async def handler(request, env, context)`.",
            option="handler",
            value=path,
        )
    check_handler("handler", found)
    handler: Handler = found
    return handler
