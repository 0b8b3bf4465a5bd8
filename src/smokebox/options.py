"""Checks that option names and values are ones we know, with an error that names the nearest."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from smokebox.errors import InvalidOption

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `InvalidOption` for the first name in `given` that is not in `known`."""
    names = sorted(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes: {', '.join(names)}."
            raise InvalidOption(
                f"{where} has no option {name!r}.",
                hint=hint,
                option=name,
                nearest=near[0] if near else None,
            )


def check_command(command: str | Sequence[str]) -> str | list[str]:
    """`command` itself: a line for a shell, or the words of one that no shell reads."""
    if isinstance(command, str):
        return command
    if (
        not isinstance(command, Sequence)
        or not command
        or not all(isinstance(word, str) for word in command)
        or not command[0]
    ):
        raise InvalidOption(
            f"a command is a str, or a sequence of str, not {command!r:.80}.",
            hint="Pass 'make test' for bash, or ['make', 'test'] for the words themselves.",
            option="command",
        )
    return list(command)


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of `env`, once every name and value in it can be an environment variable."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidOption(
            f"env is a mapping of names to values, not {type(env).__name__}.",
            hint="Pass env={'NAME': 'value'}.",
            option="env",
        )
    for name, value in env.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise InvalidOption(
                f"{name!r} is not the name of an environment variable.",
                hint="Use letters, digits and underscores, not starting with a digit.",
                option="env",
                value=name,
            )
        if not isinstance(value, str) or "\0" in value:
            raise InvalidOption(
                f"the value of the environment variable {name} must be a str without NUL.",
                hint="Convert it with str(), or leave it out.",
                option="env",
                value=name,
            )
    return dict(env)


def check_timeout(timeout: float | None) -> float | None:
    """`timeout` itself, once it is a positive number of seconds or None."""
    if timeout is None:
        return None
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or not 0 < timeout < float("inf")
    ):
        raise InvalidOption(
            f"timeout is a positive number of seconds or None, not {timeout!r}.",
            hint="Pass for example timeout=30.",
            option="timeout",
            value=timeout,
        )
    return float(timeout)


def strict_options(factory: Callable[P, R]) -> Callable[P, R]:
    """Make a keyword that `factory` does not take an `InvalidOption` that names the nearest."""
    known = inspect.signature(factory).parameters.keys()

    @functools.wraps(factory)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        refuse_unknown(f"{factory.__name__}()", options, known)
        return factory(*args, **options)

    return checked


def strict_fields(kind: type[T]) -> type[T]:
    """Make a keyword that a dataclass does not take an `InvalidOption` that names the nearest."""
    make = kind.__init__
    known = inspect.signature(kind).parameters.keys()

    @functools.wraps(make)
    def checked(self: T, *args: object, **options: object) -> None:
        refuse_unknown(f"{kind.__name__}()", options, known)
        make(self, *args, **options)

    kind.__init__ = checked  # type: ignore[method-assign, assignment]
    return kind
