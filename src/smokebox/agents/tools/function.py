"""Tools made from Python functions."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from smokebox.agents.tools.output import as_result
from smokebox.agents.tools.parameters import Parameters, parse_docstring
from smokebox.agents.tools.tool import Tool, ToolContext, ToolResult, failure
from smokebox.errors import Conflict, InvalidOption, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises.

    The thread is a daemon outside of any pool: one that never ends takes no room from
    others and does not keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value: T | None = None
        failed: BaseException | None = None
        try:
            value = context.run(function)
        except StopIteration as error:
            # A future refuses this one, which would end whatever iterates outside.
            failed = RuntimeError(f"the function raised {error!r}")
            failed.__cause__ = error
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, name="smokebox-tool", daemon=True).start()
    return await answer


P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("smokebox.tools")
_CONTEXT = "ctx"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool(Tool, Generic[P, R]):
    """A tool that is still the function it was made from."""

    wrapped: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.wrapped(*args, **kwargs)


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    durable: bool = False,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    durable: bool = False,
) -> FunctionTool[P, R] | Callable[[Callable[P, R]], FunctionTool[P, R]]:
    """Make a function a tool: `@tool`, or with options `@tool(timeout=30)`.

    Every parameter needs a type hint, but for `ctx`, which gets a `ToolContext`. One that
    is not async runs in a thread. It may return text, what JSON can hold, a `ToolImage` or
    the bytes of one, a `ToolFile`, a list of those, or a `ToolResult`; what it raises is told
    to the model. With `durable` it runs again, with the same `ctx.key`, where a crash left
    nobody knowing whether it ran to its end.
    """

    def make(function: Callable[P, R]) -> FunctionTool[P, R]:
        return _made(function, name, description, timeout, durable)

    return make if function is None else make(function)


def as_tool(value: Tool | Callable[..., object]) -> Tool:
    """A tool as it is, or a function as one."""
    if isinstance(value, Tool):
        return value
    if not callable(value) or isinstance(value, type):
        raise InvalidOption(
            f"{value!r} is not a tool.",
            hint="Pass functions with type hints, what @tool made, or Tool objects.",
            option="tools",
            value=repr(value),
        )
    return tool(value)


def as_tools(values: Iterable[Tool | Callable[..., object]]) -> list[Tool]:
    """Tools in their order. Raises `Conflict` where two have one name."""
    tools: dict[str, Tool] = {}
    for value in values:
        made = as_tool(value)
        if made.name in tools:
            raise Conflict(
                f"two tools are called {made.name!r}.",
                hint="Give one of them another name: @tool(name=...).",
                kind="tool",
                name=made.name,
            )
        tools[made.name] = made
    return list(tools.values())


def _made(
    function: Callable[P, R],
    name: str | None,
    description: str | None,
    timeout: float | None,
    durable: bool,
) -> FunctionTool[P, R]:
    plain = function.func if isinstance(function, functools.partial) else function
    called = name or str(getattr(plain, "__name__", type(function).__name__))
    if inspect.isasyncgenfunction(plain) or inspect.isgeneratorfunction(plain):
        raise InvalidOption(
            f"the tool {called!r} is a generator.",
            hint="Return the whole answer; show how far it is with ctx.output(text).",
            option="tools",
            value=called,
        )
    said = parse_docstring(inspect.getdoc(plain))
    parameters = Parameters.of(called, function, said.parameters)
    return FunctionTool(
        name=called,
        description=description or said.text or called.replace("_", " ").capitalize() + ".",
        parameters=parameters.schema,
        function=_caller(called, function, parameters),
        # The wrapper always wants to know where files go; the function perhaps not.
        context=parameters.context or _CONTEXT,
        timeout=timeout,
        durable=durable,
        wrapped=function,
    )


def _caller(name: str, function: Callable[..., Any], parameters: Parameters) -> Callable[..., Any]:
    keyword = parameters.context or _CONTEXT
    is_async = _is_async(function)

    async def call(**arguments: object) -> ToolResult:
        ctx = arguments.pop(keyword)
        assert isinstance(ctx, ToolContext)
        values = parameters.read(name, arguments)
        if parameters.context is not None:
            values[parameters.context] = ctx
        try:
            if is_async:
                value = await function(**values)
            else:
                value = await in_thread(functools.partial(function, **values))
                value = await value if inspect.isawaitable(value) else value
            return await as_result(name, value, ctx.sandbox)
        except asyncio.CancelledError:
            # The thread does not notice by itself.
            ctx.aborted.set("the call was cancelled")
            raise
        except SmokeboxError:
            raise
        except (Exception, SystemExit) as error:
            _log.warning("the tool %s raised", name, exc_info=True)
            return failure(f"{name} failed: {_said(error)}")

    return call


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_async(function: Callable[..., object]) -> bool:
    if isinstance(function, functools.partial):
        return _is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
