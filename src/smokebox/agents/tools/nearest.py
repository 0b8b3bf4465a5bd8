"""Finds what a model probably meant when the text it wants to replace is not in the file."""

from __future__ import annotations

import difflib

from smokebox.agents.tools.truncation import shorten_line

MAX_BYTES_COMPARED = 1024 * 1024
MAX_LINES_COMPARED = 5000
MAX_LINES_SHOWN = 20
_MAX_CHARACTERS_COMPARED = 200


def nearest_lines(data: bytes, wanted: bytes) -> str:
    """A sentence, and the lines of the file that are most like `wanted`."""
    lines = data[:MAX_BYTES_COMPARED].decode(errors="replace").split("\n")
    sought = wanted.decode(errors="replace").strip("\n").split("\n")
    if not lines or not any(line.strip() for line in sought):
        return "It is only white space."
    start = _same_but_for_space(lines, sought)
    if start is not None:
        said = "It is there except for white space or line endings"
    else:
        start = _most_alike(lines, sought)
        if start is None:
            return "Nothing in the file is like it: read the file again."
        said = "The nearest text is different"
    return f"{said}; {_shown(lines, start, len(sought))}"


def _same_but_for_space(lines: list[str], sought: list[str]) -> int | None:
    plain = [" ".join(line.split()) for line in lines]
    target = [" ".join(line.split()) for line in sought]
    for start in range(len(plain) - len(target) + 1):
        if plain[start] == target[0] and plain[start : start + len(target)] == target:
            return start
    return None


def _most_alike(lines: list[str], sought: list[str]) -> int | None:
    """Where the line begins that is most like the first one with something in it."""
    ahead, first = next((n, line) for n, line in enumerate(sought) if line.strip())
    matcher: difflib.SequenceMatcher[str] = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(first.strip()[:_MAX_CHARACTERS_COMPARED])
    best, best_ratio = None, 0.6
    for number, line in enumerate(lines[:MAX_LINES_COMPARED]):
        matcher.set_seq1(line.strip()[:_MAX_CHARACTERS_COMPARED])
        if matcher.real_quick_ratio() > best_ratio and matcher.quick_ratio() > best_ratio:
            ratio = matcher.ratio()
            if ratio > best_ratio:
                best, best_ratio = max(0, number - ahead), ratio
    return best


def _shown(lines: list[str], start: int, count: int) -> str:
    count = min(count, MAX_LINES_SHOWN, len(lines) - start)
    span = f"line {start + 1}" if count == 1 else f"lines {start + 1}-{start + count}"
    return f"{span} of the file:\n" + "\n".join(map(shorten_line, lines[start : start + count]))
