"""Synchronous facades of async classes, over one event loop in a background thread.

A facade has every public method of its class: a coroutine's result is returned, an async
iterator becomes an iterator, and `aclose` becomes `close`. Type checkers see `__init__.pyi`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from smokebox.client.settings import declared
from smokebox.sandbox.background_loop import BackgroundLoop

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

T = TypeVar("T")

# Names of async methods that differ here.
RENAMED = {
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
_END: Any = object()

loop = BackgroundLoop()


class Facade:
    """Synchronous form of one object of the async SDK."""

    _kind: ClassVar[type[Any]]
    _facades: ClassVar[dict[type[Any], type[Facade]]] = {}

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __init_subclass__(cls, of: type[Any] | None = None) -> None:
        if of is None:
            # A subclass by a user: declare the same settings on an async twin.
            of = type(cls.__name__, (cls._kind,), declared(cls))
        else:
            for name, member in _members(of):
                setattr(cls, RENAMED.get(name, name), member)
        cls._kind = of
        Facade._facades[of] = cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return wrap(getattr(self._inner, name))

    def __repr__(self) -> str:
        return repr(self._inner)


class StreamIterator(Iterator[T], Generic[T]):
    """Iterator over an async stream. Closing it closes the stream."""

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source = source

    def __next__(self) -> T:
        return _next(self._source)

    def close(self) -> None:
        """Close the stream early."""
        close: Callable[[], Any] | None = getattr(self._source, "aclose", None)
        if close is not None:
            loop.run(close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wrap(value: Any) -> Any:
    """Return the synchronous form of a value of the async SDK; plain values are unchanged."""
    if inspect.iscoroutine(value):
        return wrap(loop.run(value))
    if isinstance(value, list):
        return [wrap(one) for one in value]
    if isinstance(value, type):
        return Facade._facades.get(value, value)
    for kind in type(value).__mro__:
        if (facade := Facade._facades.get(kind)) is not None:
            return facade(value)
    return StreamIterator(value) if isinstance(value, AsyncIterator) else value


def unwrap(value: Any) -> Any:
    """Return the async object or class behind a facade."""
    if isinstance(value, Facade):
        return value._inner
    if isinstance(value, type) and issubclass(value, Facade):
        return value._kind
    return value


def without_await(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or method of the async SDK that needs no `await`."""
    streamed = _stream_parameters(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        named_arguments = {
            name: _as_async(value) if name in streamed else unwrap(value)
            for name, value in named.items()
        }
        positional = [
            _as_async(value) if index in streamed else unwrap(value)
            for index, value in enumerate(args)
        ]
        return wrap(function(*positional, **named_arguments))

    return call


def _members(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    for name in dir(kind):
        if name.startswith("_") and name not in RENAMED:
            continue
        member = inspect.getattr_static(kind, name)
        if name == "__aiter__":
            yield name, lambda self: self
        elif name == "__aenter__":
            yield name, _enter(member)
        elif name == "__anext__":
            yield name, lambda self: _next(self._inner)
        elif isinstance(member, classmethod):
            method = _class_method(name)
            method.__doc__ = member.__func__.__doc__
            yield name, classmethod(method)
        elif isinstance(member, property):
            yield name, property(_property(name), doc=member.__doc__)
        elif inspect.isfunction(member):
            yield name, without_await(member)


def _class_method(name: str) -> Callable[..., Any]:
    def call(cls: type[Facade], *args: Any, **named: Any) -> Any:
        return without_await(getattr(cls._kind, name))(*args, **named)

    return call


def _property(name: str) -> Callable[[Facade], Any]:
    return lambda self: wrap(getattr(self._inner, name))


def _enter(enter: Callable[[Any], Any]) -> Callable[[Facade], Facade]:
    def entered(self: Facade) -> Facade:
        loop.run(enter(self._inner))
        return self

    return entered


def _stream_parameters(function: Callable[..., Any]) -> set[str | int]:
    """Return the parameters that are streams of bytes, by name and by position."""
    parameters: set[str | int] = set()
    for index, (name, one) in enumerate(inspect.signature(function).parameters.items()):
        if "AsyncIterable" in str(one.annotation):
            parameters |= {name, index}
    return parameters


def _as_async(value: Any) -> Any:
    """Return an async iterator over an iterable whose steps may block."""
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        return value
    return _iterate(iter(value))


async def _iterate(source: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while (piece := await asyncio.to_thread(next, source, None)) is not None:
        yield piece


def _next(source: AsyncIterator[T]) -> T:
    item = loop.run(_next_item(source))
    if item is _END:
        raise StopIteration
    return item


async def _next_item(source: AsyncIterator[T]) -> T:
    return await anext(source, _END)
