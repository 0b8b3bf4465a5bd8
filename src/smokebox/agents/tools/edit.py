"""The edit tool: replaces exact text in a file, or shows the nearest text if there is none."""

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
    """Return a sentence with the lines of the file that are most similar to `wanted`."""
    lines = data[:MAX_BYTES_COMPARED].decode(errors="replace").split("\n")
    target = wanted.decode(errors="replace").strip("\n").split("\n")
    if not any(line.strip() for line in target):
        return "It is only white space."
    start = _find_ignoring_space(lines, target)
    if start is not None:
        found = "It is there except for white space or line endings"
    else:
        start = _find_similar(lines, target)
        if start is None:
            return "Nothing in the file is similar: read the file again."
        found = "The nearest text is different"
    count = min(len(target), MAX_LINES_SHOWN, len(lines) - start)
    span = f"line {start + 1}" if count == 1 else f"lines {start + 1}-{start + count}"
    shown = "\n".join(map(shorten_line, lines[start : start + count]))
    return f"{found}; {span} of the file:\n{shown}"


def _find_ignoring_space(lines: list[str], target: list[str]) -> int | None:
    plain = [" ".join(line.split()) for line in lines]
    wanted = [" ".join(line.split()) for line in target]
    for start in range(len(plain) - len(wanted) + 1):
        if plain[start] == wanted[0] and plain[start : start + len(wanted)] == wanted:
            return start
    return None


def _find_similar(lines: list[str], target: list[str]) -> int | None:
    """Return where text starts whose line is similar to the first non-blank line of `target`."""
    ahead, first = next((n, line) for n, line in enumerate(target) if line.strip())
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


MAX_LINES_NAMED = 10
_BARE_NEWLINE = re.compile(rb"(?<!\r)\n")

DESCRIPTION = """\
Replace text in a file. old_text must be in the file exactly once, character by character, with \
its indentation: include enough lines around it, or set replace_all. Both texts are literal. \
Line endings of the file (CRLF or LF) are kept."""

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
    """Return the tool `edit` for a sandbox. Edits and writes of one file are serialized."""

    async def edit(
        path: str, old_text: str, new_text: str, replace_all: bool = False
    ) -> ToolResult:
        if not old_text:
            return failure("old_text is empty. Pass the text to replace, or use write.")
        async with path_lock(sandbox, path):
            data = await load(sandbox, path)
            old, new = _match_line_endings(data, old_text.encode(), new_text.encode())
            if old == new:
                return failure("old_text and new_text are the same: there is nothing to change.")
            lines = _line_numbers(data, old)
            if not lines:
                near = await asyncio.to_thread(nearest_lines, data, old)
                return failure(f"Could not find old_text in {path}. {near}")
            count = data.count(old)
            if len(lines) > 1 and not replace_all:
                # `count` does not see overlapping occurrences.
                return failure(
                    f"Found {max(count, len(lines))} occurrences of old_text in {path}, at "
                    f"{_format_lines(lines)}; nothing was changed. Add lines around it that make "
                    "it unique, or set replace_all."
                )
            await sandbox.write_file(path, data.replace(old, new))
        occurrences = "occurrence" if count == 1 else "occurrences"
        where = _format_lines(lines)
        return ToolResult(text=f"Replaced {count} {occurrences} in {path}, at {where}.")

    return Tool(name="edit", description=DESCRIPTION, parameters=PARAMETERS, function=edit)


class _Replacement(NamedTuple):
    old: bytes
    new: bytes


def _match_line_endings(data: bytes, old: bytes, new: bytes) -> _Replacement:
    """Return both texts, with CRLF for LF if the file has CRLF there."""
    unchanged = _Replacement(old, new)
    # A model that writes CRLF may want to change line endings.
    if b"\r\n" not in data or b"\r\n" in old:
        return unchanged
    if old in data and _BARE_NEWLINE.search(data):
        return unchanged
    crlf = _Replacement(_BARE_NEWLINE.sub(b"\r\n", old), _BARE_NEWLINE.sub(b"\r\n", new))
    return crlf if crlf.old in data else unchanged


def _line_numbers(data: bytes, old: bytes) -> list[int]:
    """Return the lines where `old` starts, at most one more than `_format_lines` names."""
    found: list[int] = []
    start, line, seen = data.find(old), 1, 0
    while start >= 0 and len(found) <= MAX_LINES_NAMED:
        line += data.count(b"\n", seen, start)
        seen = start
        found.append(line)
        start = data.find(old, start + 1)
    return found


def _format_lines(lines: list[int]) -> str:
    named = list(dict.fromkeys(lines[:MAX_LINES_NAMED]))
    more = " and more" if len(lines) > MAX_LINES_NAMED else ""
    word = "line" if len(named) == 1 and not more else "lines"
    return f"{word} {', '.join(map(str, named))}{more}"
