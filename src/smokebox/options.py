"""Checks of option names and values. The error for an unknown name suggests the nearest one."""

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


def refuse_unknown(
    where: str,
    names: Iterable[str],
    known: Iterable[str],
    moved: Mapping[str, str] | None = None,
) -> None:
    """Raise `InvalidOption` for the first of `names` that is not in `known`.

    `moved` has a hint for each name that is no longer an option.
    """
    options = sorted(known)
    for name in names:
        if name not in options:
            if moved and name in moved:
                raise InvalidOption(
                    f"{where} has no option {name!r}.", hint=moved[name], option=name
                )
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes: {', '.join(options)}."
            raise InvalidOption(
                f"{where} has no option {name!r}.",
                hint=hint,
                option=name,
                nearest=near[0] if near else None,
            )


def nearest_hint(name: str, known: Iterable[str], intro: str = "There are") -> str:
    """Return a hint with the nearest known name, or with all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"{intro}: {', '.join(names[:50]) or 'none'}."


def check_command(command: str | Sequence[str]) -> str | list[str]:
    """Return `command`: text for a shell, or a list of arguments that no shell interprets."""
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
            hint="Pass 'make test' for bash, or ['make', 'test'] as arguments.",
            option="command",
        )
    return list(command)


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of `env`, or raise if a name or value is not valid in an environment."""
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
    """Return `timeout`, or raise unless it is None or a positive number of seconds."""
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


def strict_options(
    moved: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Raise `InvalidOption`, with the nearest name, for an unknown keyword of a function.

    `moved` has a hint for each keyword that is no longer an option.
    """

    def decorate(factory: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(factory).parameters.keys()

        @functools.wraps(factory)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            refuse_unknown(f"{factory.__name__}()", options, known, moved)
            return factory(*args, **options)

        return checked

    return decorate


def strict_fields(kind: type[T]) -> type[T]:
    """Raise `InvalidOption`, with the nearest name, for an unknown keyword of a dataclass."""
    init = kind.__init__
    known = inspect.signature(kind).parameters.keys()

    @functools.wraps(init)
    def checked(self: T, *args: object, **options: object) -> None:
        refuse_unknown(f"{kind.__name__}()", options, known)
        init(self, *args, **options)

    kind.__init__ = checked  # type: ignore[method-assign, assignment]
    return kind
