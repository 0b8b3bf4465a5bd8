"""`seq`, with a clear error where the output would be too large for the shell."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, NamedTuple

from smokebox.sandbox.virtual.command import CommandOutput
from smokebox.sandbox.virtual.commands.arguments import UsageError, failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smokebox.sandbox.virtual.command import CommandCall

# The output is held in memory at once, and the shell holds at most 32 MB.
_MAX_BYTES = 30_000_000
_BLOCK = 8192
_MAX_DIGITS = 40
_INTEGER = re.compile(r"[+-]?\d+")
_FORMAT = re.compile(r"(?:[^%]|%%)*%[-+ 0#]*\d{0,3}(?:\.\d{1,3})?[efgEFG](?:[^%]|%%)*")
_LONG = {"--format": "-f", "--separator": "-s", "--equal-width": "-w"}


def seq(call: CommandCall) -> CommandOutput:
    """Print a sequence of numbers."""
    try:
        plan = _read(call.args)
        blocks: list[str] = []
        size = 0
        while lines := list(itertools.islice(plan.numbers, _BLOCK)):
            size += sum(map(len, lines)) + len(plan.separator) * len(lines)
            if size > _MAX_BYTES:
                raise UsageError(
                    f"more than {_MAX_BYTES} bytes of numbers; count in a loop instead"
                )
            blocks.append(plan.separator.join(lines))
    except UsageError as error:
        return failure("seq", str(error))
    return CommandOutput(stdout=plan.separator.join(blocks) + "\n" if blocks else "")


class _Plan(NamedTuple):
    """Formatted numbers and their separator."""

    numbers: Iterator[str]
    separator: str


def _read(words: list[str]) -> _Plan:
    options: dict[str, str] = {"-s": "\n"}
    rest = list(words)
    while rest and rest[0].startswith("-") and not _is_number(rest[0]):
        word = rest.pop(0)
        if word == "--":
            break
        _take_option(options, word, rest)
    if not 1 <= len(rest) <= 3:
        raise UsageError(f"extra operand '{rest[3]}'" if rest else "missing operand")
    for word in rest:
        if not _is_number(word):
            raise UsageError(f"invalid floating point argument: '{word}'")
    first = rest[0] if len(rest) > 1 else "1"
    step = rest[1] if len(rest) > 2 else "1"
    return _Plan(_numbers(first, step, rest[-1], options), options["-s"])


def _take_option(options: dict[str, str], word: str, rest: list[str]) -> None:
    name, joined, value = word.partition("=") if word.startswith("--") else (word, "", "")
    name = _LONG.get(name, name)
    if name == "-w":
        options["-w"] = ""
    elif name in ("-s", "-f"):
        if not joined and not rest:
            raise UsageError(f"option requires an argument -- '{name[1]}'")
        options[name] = value if joined else rest.pop(0)
    elif name[:2] in ("-s", "-f") and not word.startswith("--"):
        options[name[:2]] = name[2:]
    elif name.startswith("-w") and len(name) > 2:
        options["-w"] = ""
        rest.insert(0, f"-{name[2:]}")
    else:
        raise UsageError(f"invalid option -- '{word.lstrip('-')}'")


def _is_number(word: str) -> bool:
    # Short, and small enough to print.
    try:
        number = Decimal(word)
    except InvalidOperation:
        return False
    return len(word) <= _MAX_DIGITS and number.is_finite() and abs(number.adjusted()) <= _MAX_DIGITS


def _numbers(first: str, step: str, last: str, options: dict[str, str]) -> Iterator[str]:
    if not Decimal(step):
        raise UsageError(f"invalid Zero increment value: '{step}'")
    show = _formatter(options["-f"]) if "-f" in options else None
    if all(_INTEGER.fullmatch(word) for word in (first, step, last)):
        span = range(int(first), int(last) + (1 if int(step) > 0 else -1), int(step))
        if show:
            return map(show, map(Decimal, span))
        if "-w" in options and span:
            width = max(len(str(int(first))), len(str(span[-1])))
            return (str(number).zfill(width) for number in span)
        return map(str, span)
    values = _decimals(Decimal(first), Decimal(step), Decimal(last))
    if show:
        return map(show, values)
    places = max(_places(first), _places(step))
    width = (
        max(len(f"{Decimal(word):.{places}f}") for word in (first, last)) if "-w" in options else 0
    )
    return (f"{value:.{places}f}".zfill(width) for value in values)


def _decimals(first: Decimal, step: Decimal, last: Decimal) -> Iterator[Decimal]:
    for index in itertools.count():
        value = first + index * step
        if (value > last) if step > 0 else (value < last):
            return
        yield value


def _places(word: str) -> int:
    exponent = Decimal(word).as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _formatter(text: str) -> Callable[[Decimal], str]:
    if not _FORMAT.fullmatch(text):
        raise UsageError(f"format '{text}' has no % directive, or more than one")
    return lambda value: text % float(value)
