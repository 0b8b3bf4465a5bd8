"""The edit tool: replaces text in a file, exactly, and helps when it cannot be found."""

from __future__ import annotations

import asyncio
import difflib
import re
from typing import TYPE_CHECKING, NamedTuple

from smokebox.agents.tools.files import load, path_lock
from smokebox.agents.tools.output import shorten_line
from smokebox.agents.tools.tool import Tool, ToolResult, failure

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi


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


MAX_LINES_NAMED = 10
_BARE_NEWLINE = re.compile(rb"(?<!\r)\n")

DESCRIPTION = """\
Replace text in a file. old_text must be in the file exactly once, character by character, with \
its indentation: give enough lines around it, or set replace_all. Nothing in either text is \
special. Line endings of the file (CRLF or LF) are kept."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {
            "type": "string",
            "description": "File to change; a relative path starts at the working directory.",
        },
        "old_text": {"type": "string", "description": "The exact text to replace."},
        "new_text": {"type": "string", "description": "The text to put in its place."},
        "replace_all": {
            "type": "boolean",
            "description": "Replace every occurrence instead of exactly one. Default false.",
        },
    },
    "required": ["path", "old_text", "new_text"],
    "additionalProperties": False,
}


def edit_tool(sandbox: SandboxApi) -> Tool:
    """`edit`, over `sandbox`. Edits and writes of one file take turns."""

    async def edit(
        path: str, old_text: str, new_text: str, replace_all: bool = False
    ) -> ToolResult:
        if not old_text:
            return failure("old_text is empty. Give the text to replace, or use write.")
        async with path_lock(sandbox, path):
            data = await load(sandbox, path)
            old, new = _with_endings_of(data, old_text.encode(), new_text.encode())
            if old == new:
                return failure("old_text and new_text are the same: there is nothing to change.")
            lines = _lines_of(data, old)
            if not lines:
                near = await asyncio.to_thread(nearest_lines, data, old)
                return failure(f"Could not find old_text in {path}. {near}")
            if len(lines) > 1 and not replace_all:
                return _ambiguous(path, data, old, lines)
            await sandbox.write_file(path, data.replace(old, new))
        count = data.count(old)
        occurrences = "occurrence" if count == 1 else "occurrences"
        return ToolResult(text=f"Replaced {count} {occurrences} in {path}, at {_where(lines)}.")

    return Tool(name="edit", description=DESCRIPTION, parameters=PARAMETERS, function=edit)


class _Replacement(NamedTuple):
    old: bytes
    new: bytes


def _with_endings_of(data: bytes, old: bytes, new: bytes) -> _Replacement:
    """Both texts with CRLF where the file has it and the model wrote LF."""
    as_given = _Replacement(old, new)
    # Someone who writes CRLF is minding line endings, and may want to change them.
    if b"\r\n" not in data or b"\r\n" in old:
        return as_given
    if old in data and _BARE_NEWLINE.search(data):
        return as_given
    crlf = _Replacement(_BARE_NEWLINE.sub(b"\r\n", old), _BARE_NEWLINE.sub(b"\r\n", new))
    return crlf if crlf.old in data else as_given


def _lines_of(data: bytes, old: bytes) -> list[int]:
    """The numbers of the lines where `old` begins, one more than are named; overlaps count."""
    found: list[int] = []
    start, line, seen = data.find(old), 1, 0
    while start >= 0 and len(found) <= MAX_LINES_NAMED:
        line += data.count(b"\n", seen, start)
        seen = start
        found.append(line)
        start = data.find(old, start + 1)
    return found


def _where(lines: list[int]) -> str:
    """Those lines in words, each once."""
    named = list(dict.fromkeys(lines[:MAX_LINES_NAMED]))
    more = " and more" if len(lines) > MAX_LINES_NAMED else ""
    return (
        ("line " if len(named) == 1 and not more else "lines ") + ", ".join(map(str, named)) + more
    )


def _ambiguous(path: str, data: bytes, old: bytes, lines: list[int]) -> ToolResult:
    # Where occurrences overlap, `count` sees fewer of them.
    count = max(data.count(old), len(lines))
    return failure(
        f"Found {count} occurrences of old_text in {path}, at {_where(lines)}; nothing was "
        "changed. Add lines around it that make it unique, or set replace_all."
    )
