"""The edit tool: replaces text in a file, exactly, and helps when it cannot be found."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, NamedTuple

from smokebox.agents.tools.files import load, path_lock
from smokebox.agents.tools.nearest import nearest_lines
from smokebox.agents.tools.tool import Tool, ToolResult, failure

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

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
