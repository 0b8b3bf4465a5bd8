"""`smokebox complete`: what fits at the end of a command line, for the scripts of shells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smokebox.cli.trailing import Trailing
from smokebox.cli.verbs import VERBS, load

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Offer:
    """A word that fits, and what it is."""

    word: str
    help: str = ""


def complete(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="What was typed.")],
) -> int:
    """Print what fits at the end of a command line."""
    for offer in offers(words[:-1], words[-1]):
        typer.echo(f"{offer.word}\t{offer.help}")
    return 0


complete.command_class = Trailing  # type: ignore[attr-defined]


def offers(before: list[str], begun: str) -> list[Offer]:
    """What fits after the words `before`, and begins with `begun`."""
    command, rest = _verb(before)
    found = _after(command, rest, begun) if command is not None else _verbs()
    return [offer for offer in found if offer.word.startswith(begun)]


def _verb(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name so far, and those after it."""
    rest = [word for word in words if word != "--debug"]
    if not rest or rest[0] not in VERBS:
        return None, rest
    command, rest = load(rest[0]), rest[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def _verbs() -> Iterator[Offer]:
    for name, verb in VERBS.items():
        if not verb.hidden:
            yield Offer(name, load(name).get_short_help_str(70))


def _after(command: Any, words: list[str], begun: str) -> Iterator[Offer]:
    if hasattr(command, "commands"):
        yield from (
            Offer(name, one.get_short_help_str(70)) for name, one in command.commands.items()
        )
        return
    options = {name: one for one in command.params for name in one.opts if name.startswith("-")}
    if words and (option := options.get(words[-1])) is not None and not option.is_flag:
        yield from _choices(option)
        return
    if begun.startswith("-") and "--" not in words:
        yield from (Offer(name, one.help or "") for name, one in options.items())
        return
    given = [
        word
        for at, word in enumerate(words)
        if not word.startswith("-") and not _is_value(options, words[:at])
    ]
    yield from _arguments(command, given)


def _is_value(options: dict[str, Any], before: list[str]) -> bool:
    """Whether the word after these is the value of an option."""
    option = options.get(before[-1]) if before else None
    return option is not None and not option.is_flag


def _arguments(command: Any, given: list[str]) -> Iterator[Offer]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    if not arguments:
        return
    here = arguments[min(len(given), len(arguments) - 1)]
    if len(given) >= len(arguments) and here.nargs == 1:
        return
    if here.name in ("id", "ids"):
        yield from (Offer(*one) for one in _sandboxes().items() if one[0] not in given)
    elif here.name in ("process", "processes") and given:
        yield from (Offer(*one) for one in _processes(given[0]).items())
    elif here.name in ("source", "target"):
        yield from (Offer(f"{id}:", status) for id, status in _sandboxes().items())
    else:
        yield from _choices(here)


def _choices(param: Any) -> Iterator[Offer]:
    yield from (Offer(str(one)) for one in getattr(param.type, "choices", ()))


def _sandboxes() -> dict[str, str]:
    from smokebox.cli.completion.known import sandboxes

    return sandboxes()


def _processes(id: str) -> dict[str, str]:
    from smokebox.cli.completion.known import processes

    return processes(id)
