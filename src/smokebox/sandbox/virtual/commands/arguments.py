"""GNU-style argument parser for our commands: clusters, long names, permutation."""

from __future__ import annotations

import getopt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.sandbox.virtual.command import CommandOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class UsageError(Exception):
    """Invalid command line; the text is what the command prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Parsed options in order, each under one name, and the operands."""

    options: Sequence[tuple[str, str]]
    operands: list[str]

    def has(self, *names: str) -> bool:
        """Return whether any of the options was given."""
        return any(name in names for name, _ in self.options)

    def last(self, *names: str) -> str | None:
        """Return the value of the last of these options, or None."""
        return next((value for name, value in reversed(self.options) if name in names), None)


def parse(words: list[str], short: str, long: Mapping[str, str]) -> Arguments:
    """Parse a command line, or raise `UsageError`.

    `short` is as in getopt(3). `long` maps each long option, followed by `=` if it takes a value
    and `?` if the value is optional, to the name it is reported under.
    """
    optional = {name[:-1] for name in long if name.endswith("?")}
    plain = [_with_value(word, optional) for word in words]
    names = [f"{name[:-1]}=" if name.endswith("?") else name for name in long]
    try:
        found, operands = getopt.gnu_getopt(plain, short, names)
    except getopt.GetoptError as error:
        raise UsageError(_gnu_message(error)) from None
    known = {name.rstrip("=?"): short_name for name, short_name in long.items()}
    options = [(known.get(name[2:], name.lstrip("-")), value) for name, value in found]
    return Arguments(options=options, operands=operands)


def failure(name: str, message: str, exit_code: int = 1) -> CommandOutput:
    """Return a command's one-line error."""
    return CommandOutput(stderr=f"{name}: {message}\n", exit_code=exit_code)


def _with_value(word: str, optional: set[str]) -> str:
    # getopt would take the next word as the value: an empty one prevents that.
    return f"{word}=" if word.startswith("--") and word[2:] in optional else word


def _gnu_message(error: getopt.GetoptError) -> str:
    if "requires argument" in error.msg:
        return f"option requires an argument -- '{error.opt}'"
    if len(error.opt) == 1:
        return f"invalid option -- '{error.opt}'"
    return f"unrecognized option '--{error.opt}'"
