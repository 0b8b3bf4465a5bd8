"""Takes a docstring apart: what a function does, and what its parameters are.

Reads the three ways in which people write them: Google, numpy and reST.
"""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import dataclass, field

_SECTIONS = (
    "args|arguments|parameters|params|keyword args|keyword arguments|other parameters|returns?|"
    "yields?|raises?|warns?|warnings?|examples?|notes?|references|see also|todo|attributes"
)
_PARAMETERS = re.compile(r"(?i)(?:keyword )?(?:args|arguments|params|(?:other )?parameters)")
_GOOGLE = re.compile(rf"(?i)({_SECTIONS}):\s*")
_NUMPY = re.compile(rf"(?i)({_SECTIONS})\s*")
_REST = re.compile(r":(\w+)((?:\s+[^:\s]+)*)\s*:(?:\s+(.*))?")
_REST_PARAMETERS = {"param", "parameter", "arg", "argument", "key", "keyword"}
_GOOGLE_ITEM = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY_ITEM = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?")


@dataclass(slots=True)
class Docstring:
    """What a docstring says, each text on one line but for the paragraphs of the first."""

    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(docstring: str | None) -> Docstring:
    """The text before the first section, and the parameters in whichever form they are."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    ends = [n for n in range(len(lines)) if _begins_section(lines, n)]
    found = Docstring(text="\n".join(lines[: ends[0]] if ends else lines).strip())
    for start, end in itertools.pairwise([*ends, len(lines)]):
        _read_section(lines[start:end], found.parameters)
    return found


def _begins_section(lines: list[str], number: int) -> bool:
    line = lines[number]
    rest = _REST.fullmatch(line)
    if rest or _GOOGLE.fullmatch(line):
        return True
    return bool(_NUMPY.fullmatch(line)) and _is_underline(lines, number + 1)


def _is_underline(lines: list[str], number: int) -> bool:
    return number < len(lines) and re.fullmatch(r"-{3,}\s*", lines[number]) is not None


def _read_section(lines: list[str], into: dict[str, str]) -> None:
    rest = _REST.fullmatch(lines[0])
    if rest:
        if rest[1] in _REST_PARAMETERS and rest[2].split():
            # `:param int count: How many.` has the type before the name.
            into[rest[2].split()[-1]] = _joined([rest[3] or "", *lines[1:]])
        return
    if not _PARAMETERS.fullmatch(lines[0].strip().rstrip(":")):
        return
    numpy = _is_underline(lines, 1)
    _read_items(lines[2 if numpy else 1 :], _NUMPY_ITEM if numpy else _GOOGLE_ITEM, into)


def _read_items(lines: list[str], form: re.Pattern[str], into: dict[str, str]) -> None:
    indent = min((_indent(line) for line in lines if line.strip()), default=0)
    said: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines:
        item = form.fullmatch(line.strip()) if _indent(line) == indent else None
        if item:
            names = re.split(r"\s*,\s*", item[1])
            said.update((name, list(item.groups()[1:])) for name in names)
        else:
            for name in names:
                said[name].append(line)
    into.update((name, _joined(words)) for name, words in said.items())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
