"""Egress handlers: Python functions that edit, respond to or refuse requests of a sandbox."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from smokebox.egress.message import Request, Response


CLIENT = "@client"
"""Name of a handler that runs in the process of a client."""

CATCH_ALL = ""
"""Slot of `outbound`. The slot of an entry of `outbound_by_host` is its pattern."""


class Refused(Exception):
    """Raised by a handler to refuse a request; the sandbox gets 403 and the reason."""


class HandlerFailed(Exception):
    """A handler in another process failed with an exception of class `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the handler failed with {kind}")
        self.kind = kind


class HandlerContext(Protocol):
    """The sandbox and the policy entry of a request, and a way to send it."""

    @property
    def sandbox_id(self) -> str:
        """Id of the sandbox that sent the request."""
        ...

    @property
    def rule(self) -> str:
        """Policy entry that chose the handler, such as `outbound_by_host['*.example.com']`."""
        ...

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        """Send a request, and return the response, whose body arrives as it is read.

        Args:
            to: Start of a URL, such as `http://127.0.0.1:8080`, to send it to instead. It may
                be at a private address.
        """
        ...


Handler: TypeAlias = (
    "Callable[[Request, Any, HandlerContext], Awaitable[Request | Response] | Request | Response]"
)
"""Function of a request, `env` (which has the secrets) and a context; async, or plain and quick.

It returns the request, edited or not, to send it, or a `Response`, which may be one that
`context.forward` returned; or it raises `Refused`. Any other exception or result becomes a
response of 502, and a handler that takes too long one of 504; nothing is sent then.
"""

HandlerOption: TypeAlias = "Handler | str"
"""A handler, or `package.module:name` of one that the server imports."""


async def run_handler(
    handler: Handler, request: Request, env: object, context: HandlerContext
) -> Request | Response:
    """Call a handler and return its result.

    Raises:
        TypeError: It returned neither a request nor a response.
        Exception: Raised by the handler.
    """
    # Every engine imports this module, and few sandboxes have a handler.
    from smokebox.egress.message import Request, Response

    result: object = handler(request, env, context)
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, (Request, Response)):
        return result
    raise TypeError(f"it returned {type(result).__name__}, and neither a Request nor a Response")


def check_handler(option: str, handler: object) -> None:
    """Raise `InvalidOption` if a value cannot be a handler."""
    hint = "Write `async def handler(request, env, context)`; see docs/network.md."
    if callable(handler):
        if not _takes_three_arguments(handler):
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
    """Return the name of a handler for logs, without secrets that it holds."""
    if handler is None or isinstance(handler, str):
        return handler
    name = getattr(handler, "__qualname__", None) or getattr(handler, "__name__", None)
    return str(name or type(handler).__qualname__)


def _takes_three_arguments(handler: Callable[..., object]) -> bool:
    try:
        inspect.signature(handler).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:
        return True  # Some functions written in C have no signature.
    return True


@functools.lru_cache(256)
def load_handler(path: str) -> Handler:
    """Import a handler from `package.module:name`. Raises `InvalidOption`."""
    check_handler("handler", path)
    module, _, names = path.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise InvalidOption(
            f"there is no handler {path!r}: {error}.",
            hint="The server imports it: its module must be on the server's Python path.",
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
            f"{path!r} is {type(found).__name__}, not a handler.",
            hint="Write `async def handler(request, env, context)`.",
            option="handler",
            value=path,
        )
    check_handler("handler", found)
    handler: Handler = found
    return handler


HandlerLoader: TypeAlias = "Callable[[str], Handler]"
"""Imports a handler by its name. Raises `Refused` if the operator does not allow it."""


class HandlerRunner(Protocol):
    """Runs handlers by slot: a connected client, or this process."""

    @property
    def slots(self) -> Collection[str]:
        """Slots that it has a handler for."""
        ...

    async def handle(
        self, slot: str, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Run the handler of a slot."""
        ...


class LocalHandlers:
    """`HandlerRunner` of functions of this process."""

    def __init__(self, handlers: Mapping[str, HandlerOption]) -> None:
        self._handlers = {slot: one for slot, one in handlers.items() if callable(one)}

    @property
    def slots(self) -> Collection[str]:
        """Slots that it has a handler for."""
        return self._handlers.keys()

    async def handle(
        self, slot: str, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Run the handler of a slot."""
        return await run_handler(self._handlers[slot], request, env, context)


class HandlerRegistry:
    """Runners of the `@client` handlers of one sandbox; the latest that has a slot serves it."""

    def __init__(self, load: HandlerLoader = load_handler) -> None:
        self._load = load
        self._runners: list[HandlerRunner] = []

    @property
    def slots(self) -> set[str]:
        """Slots that have a runner."""
        return {slot for runner in self._runners for slot in runner.slots}

    def attach(self, runner: HandlerRunner) -> Callable[[], None]:
        """Add a runner; call the result to remove it, more than once if need be."""
        self._runners.append(runner)

        def detach() -> None:
            if runner in self._runners:
                self._runners.remove(runner)

        return detach

    def bind(self, slot: str, handler: HandlerOption) -> HandlerOption:
        """Return the handler to call for a policy's entry: see `EgressLayers.egress`."""
        if handler == CLIENT:
            return ClientHandler(self, slot)
        return NamedHandler(handler, self._load) if isinstance(handler, str) else handler

    def find_runner(self, slot: str) -> HandlerRunner:
        """Return the runner of a slot. Raises `Refused` if there is none."""
        for runner in reversed(self._runners):
            if slot in runner.slots:
                return runner
        entry = "outbound" if slot == CATCH_ALL else f"outbound_by_host[{slot!r}]"
        raise Refused(f"the handler {entry} runs in the process of a client, and none is connected")


class NamedHandler:
    """A `Handler` that is imported by its name for each request, where that is allowed."""

    def __init__(self, name: str, load: HandlerLoader) -> None:
        self._load = load
        self.__name__ = self.__qualname__ = name

    async def __call__(
        self, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        # Importing a user's module may take long.
        handler = await asyncio.to_thread(self._load, self.__name__)
        return await run_handler(handler, request, env, context)


class ClientHandler:
    """A `Handler` that runs wherever its slot is served when a request arrives."""

    def __init__(self, registry: HandlerRegistry, slot: str) -> None:
        self._registry = registry
        self._slot = slot
        self.__name__ = self.__qualname__ = CLIENT

    async def __call__(
        self, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        runner = self._registry.find_runner(self._slot)
        return await runner.handle(self._slot, request, env, context)
