"""Async classes with their names and without `await`, over one loop in the background.

A facade has every public method of the class that it stands for: what that would be awaited
for is given, what it iterates over by `async for` is iterated over, and `aclose` is `close`.
What the classes here look like to a type checker is in `__init__.pyi`.
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

# What a method is called here, where that is not what it is called there.
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
    """Stands for one object of the async SDK."""

    _kind: ClassVar[type[Any]]
    _facades: ClassVar[dict[type[Any], type[Facade]]] = {}

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __init_subclass__(cls, of: type[Any] | None = None) -> None:
        if of is None:
            # A user's own kind of sandboxes: with the same settings there, its methods here.
            of = type(cls.__name__, (cls._kind,), declared(cls))
        else:
            for name, member in _members(of):
                setattr(cls, RENAMED.get(name, name), member)
        cls._kind = of
        Facade._facades[of] = cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return wrapped(getattr(self._inner, name))

    def __repr__(self) -> str:
        return repr(self._inner)


class Stream(Iterator[T], Generic[T]):
    """What an async stream gives, as an iterator. Closing it ends what it comes from."""

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source = source

    def __next__(self) -> T:
        return _next(self._source)

    def close(self) -> None:
        """End it before its end."""
        close: Callable[[], Any] | None = getattr(self._source, "aclose", None)
        if close is not None:
            loop.run(close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wrapped(value: Any) -> Any:
    """What stands here for a value of the async SDK; what needs nobody is given as it is."""
    if inspect.iscoroutine(value):
        return wrapped(loop.run(value))
    if isinstance(value, list):
        return [wrapped(one) for one in value]
    if isinstance(value, type):
        return Facade._facades.get(value, value)
    for kind in type(value).__mro__:
        if (facade := Facade._facades.get(kind)) is not None:
            return facade(value)
    return Stream(value) if isinstance(value, AsyncIterator) else value


def unwrapped(value: Any) -> Any:
    """What a facade, or a class of them, stands for."""
    if isinstance(value, Facade):
        return value._inner
    if isinstance(value, type) and issubclass(value, Facade):
        return value._kind
    return value


def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function or method of the async SDK, without `await`."""
    streamed = _streamed(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        given = {
            name: _asynchronous(value) if name in streamed else unwrapped(value)
            for name, value in named.items()
        }
        positional = [
            _asynchronous(value) if index in streamed else unwrapped(value)
            for index, value in enumerate(args)
        ]
        return wrapped(function(*positional, **given))

    return call


def _members(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    for name in dir(kind):
        if name.startswith("_") and name not in RENAMED:
            continue
        member = inspect.getattr_static(kind, name)
        if name == "__aiter__":
            yield name, lambda self: self
        elif name == "__aenter__":
            yield name, _entering(member)
        elif name == "__anext__":
            yield name, lambda self: _next(self._inner)
        elif isinstance(member, classmethod):
            yield name, classmethod(_of_class(name))
        elif isinstance(member, property):
            yield name, property(_property(name), doc=member.__doc__)
        elif inspect.isfunction(member):
            yield name, calling(member)


def _of_class(name: str) -> Callable[..., Any]:
    def call(cls: type[Facade], *args: Any, **named: Any) -> Any:
        return calling(getattr(cls._kind, name))(*args, **named)

    return call


def _property(name: str) -> Callable[[Facade], Any]:
    return lambda self: wrapped(getattr(self._inner, name))


def _entering(enter: Callable[[Any], Any]) -> Callable[[Facade], Facade]:
    def entered(self: Facade) -> Facade:
        loop.run(enter(self._inner))
        return self

    return entered


def _streamed(function: Callable[..., Any]) -> set[str | int]:
    """The parameters that are streams of bytes, by name and by place."""
    found: set[str | int] = set()
    for index, (name, one) in enumerate(inspect.signature(function).parameters.items()):
        if "AsyncIterable" in str(one.annotation):
            found |= {name, index}
    return found


def _asynchronous(value: Any) -> Any:
    """An iterable, each of whose steps may block, for the loop."""
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        return value
    return _stepping(iter(value))


async def _stepping(source: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while (piece := await asyncio.to_thread(next, source, None)) is not None:
        yield piece


def _next(source: AsyncIterator[T]) -> T:
    item = loop.run(_following(source))
    if item is _END:
        raise StopIteration
    return item


async def _following(source: AsyncIterator[T]) -> T:
    return await anext(source, _END)
