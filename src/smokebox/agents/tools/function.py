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
    """Run `function` in a daemon thread outside of any pool, and return its result.

    A function that never returns blocks neither a pool nor the exit of the program.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = context.run(function)
        except StopIteration as error:
            # A future does not accept this exception.
            failure = RuntimeError(f"the function raised {error!r}")
            failure.__cause__ = error
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # The loop was closed.
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="smokebox-tool", daemon=True).start()
    return await result


P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("smokebox.tools")
_CONTEXT = "ctx"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool(Tool, Generic[P, R]):
    """A tool made from a function, which can still be called as before."""

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

    Every parameter needs a type hint, except `ctx`, which gets a `ToolContext`. A function
    that is not async runs in a thread. It may return text, a value that can be encoded as
    JSON, a `ToolImage` or its bytes, a `ToolFile`, a list of those, or a `ToolResult`. The
    model sees an exception as an error.

    Args:
        function: The function.
        name: Name for the model, by default the function's.
        description: Text for the model, by default the start of the docstring.
        timeout: Seconds after which a call is stopped.
        durable: Run again, with the same `ctx.key`, if a crash left it unknown whether the
            call had ended.

    Raises:
        InvalidOption: A parameter has no type hint, or no model can pass its type.
    """

    def decorate(function: Callable[P, R]) -> FunctionTool[P, R]:
        return _function_tool(function, name, description, timeout, durable)

    return decorate if function is None else decorate(function)


def as_tool(value: Tool | Callable[..., object]) -> Tool:
    """Return a tool as it is, or make a function one."""
    if isinstance(value, Tool):
        return value
    if not callable(value) or isinstance(value, type):
        raise InvalidOption(
            f"{value!r} is not a tool.",
            hint="Pass functions with type hints, functions with @tool, or Tool objects.",
            option="tools",
            value=repr(value),
        )
    return tool(value)


def as_tools(values: Iterable[Tool | Callable[..., object]]) -> list[Tool]:
    """Return tools in order. Raises `Conflict` if two have the same name."""
    tools: dict[str, Tool] = {}
    for value in values:
        found = as_tool(value)
        if found.name in tools:
            raise Conflict(
                f"two tools have the name {found.name!r}.",
                hint="Rename one of them: @tool(name=...).",
                kind="tool",
                name=found.name,
            )
        tools[found.name] = found
    return list(tools.values())


def _function_tool(
    function: Callable[P, R],
    name: str | None,
    description: str | None,
    timeout: float | None,
    durable: bool,
) -> FunctionTool[P, R]:
    plain = function.func if isinstance(function, functools.partial) else function
    name = name or str(getattr(plain, "__name__", type(function).__name__))
    if inspect.isasyncgenfunction(plain) or inspect.isgeneratorfunction(plain):
        raise InvalidOption(
            f"the tool {name!r} is a generator.",
            hint="Return the whole result; report progress with ctx.output(text).",
            option="tools",
            value=name,
        )
    docstring = parse_docstring(inspect.getdoc(plain))
    parameters = Parameters.of(name, function, docstring.parameters)
    return FunctionTool(
        name=name,
        description=description or docstring.text or name.replace("_", " ").capitalize() + ".",
        parameters=parameters.schema,
        function=_caller(name, function, parameters),
        # The wrapper needs the context, even if the function does not.
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
            # A thread cannot be cancelled.
            ctx.aborted.set("the call was cancelled")
            raise
        except SmokeboxError:
            raise
        except (Exception, SystemExit) as error:
            _log.warning("the tool %s raised", name, exc_info=True)
            kind = type(error).__name__
            return failure(
                f"{name} failed: {kind}: {error}" if str(error) else f"{name} failed: {kind}"
            )

    return call


def _is_async(function: Callable[..., object]) -> bool:
    if isinstance(function, functools.partial):
        return _is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
