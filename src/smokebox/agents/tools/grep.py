"""The grep tool: finds lines in files by a regular expression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.files import as_given
from smokebox.agents.tools.hits import MAX_COUNTED, MAX_MATCHES, Hit
from smokebox.agents.tools.search import TIMEOUT, Engine, Found, Query, find_engine, search
from smokebox.agents.tools.tool import Tool, ToolResult, failure
from smokebox.agents.tools.truncation import MAX_LINE_BYTES, fitting_lines, one_line
from smokebox.errors import PathError

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

MAX_CONTEXT = 10
# Linux lets one environment variable have 128 KiB.
MAX_PATTERN_BYTES = 64 * 1024

DESCRIPTION = f"""\
Search the contents of files for a regular expression, line by line. Gives `path:line:text`, \
at most {MAX_MATCHES} matches, lines cut at {MAX_LINE_BYTES} bytes. Hidden files are searched; \
binary files, .git and node_modules are not, nor, where ripgrep is installed, what .gitignore \
names. Name such a directory as path to search in it."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "pattern": {
            "type": "string",
            "minLength": 1,
            "description": "Regular expression, for example `def \\w+_tool`.",
        },
        "path": {
            "type": "string",
            "description": "File or directory to search. Default: the working directory.",
        },
        "include": {
            "type": "string",
            "minLength": 1,
            "description": "Only files that match this glob: `*.py`, `src/**/*.{ts,tsx}`, `!*.md`.",
        },
        "literal": {
            "type": "boolean",
            "description": "Take the pattern as plain text. Default false.",
        },
        "ignore_case": {"type": "boolean", "description": "Default false."},
        "context": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_CONTEXT,
            "description": "Lines to show before and after each match. Default 0.",
        },
    },
    "required": ["pattern"],
    "additionalProperties": False,
}


def grep_tool(sandbox: SandboxApi) -> Tool:
    """`grep`, over `sandbox`. Looks once which programs the sandbox has."""
    engine: Engine | None = None

    async def grep(
        pattern: str,
        path: str = ".",
        include: str | None = None,
        literal: bool = False,
        ignore_case: bool = False,
        context: int = 0,
    ) -> ToolResult:
        nonlocal engine
        if fault := _fault(pattern):
            return failure(fault)
        info = await sandbox.stat(path)
        if not (info.is_file or info.is_directory):
            raise PathError(path, f"neither a file nor a directory: {path}.")
        engine = engine or await find_engine(sandbox)
        query = Query(
            pattern=pattern,
            root=sandbox.resolve_path(path),
            include=include,
            literal=literal,
            ignore_case=ignore_case,
            context=context,
        )
        found = await search(sandbox, engine, query)
        return _answer(found, _lines(sandbox, path, found.hits, separated=context > 0))

    return Tool(name="grep", description=DESCRIPTION, parameters=PARAMETERS, function=grep)


def _fault(pattern: str) -> str:
    if "\n" in pattern:
        return (
            "pattern holds a line break, and grep goes line by line. "
            "Search for one of the lines, or write \\n-free alternatives with |."
        )
    if "\0" in pattern:
        return "pattern holds a NUL character. Text files have none: remove it."
    if len(pattern.encode()) > MAX_PATTERN_BYTES:
        return f"pattern has more than {MAX_PATTERN_BYTES} bytes. Search for a part of it."
    return ""


def _lines(sandbox: SandboxApi, path: str, hits: list[Hit], *, separated: bool) -> list[str]:
    """One for each hit; where there is context, a gap is marked as grep does."""
    written = as_given(sandbox, path)
    lines: list[str] = []
    for before, hit in zip([None, *hits], hits, strict=False):
        follows = before is None or (before.path, before.line + 1) == (hit.path, hit.line)
        gap = "--\n" if separated and not follows else ""
        sign = ":" if hit.is_match else "-"
        name = one_line(written(hit.path))
        lines.append(f"{gap}{name}{sign}{hit.line}{sign}{hit.text}")
    return lines


def _answer(found: Found, lines: list[str]) -> ToolResult:
    trouble = _trouble(found)
    if not lines:
        return failure(trouble) if trouble else ToolResult(text="No matches found.")
    shown = fitting_lines(lines, len(lines))
    matches = sum(hit.is_match for hit in found.hits[:shown])
    text = "\n".join(lines[:shown])
    if matches < found.count:
        count = f"more than {MAX_COUNTED}" if found.count > MAX_COUNTED else found.count
        text += f"\n\n[Showing {matches} of {count} matches. Narrow the pattern or path.]"
    return ToolResult(text=f"{text}\n\n[{trouble}]" if trouble else text)


def _trouble(found: Found) -> str:
    """What kept the search from being whole; 0 and 1 are grep's codes for all is well."""
    if found.exit_code <= 1:
        return ""
    if found.exit_code == 124:
        return f"The search was stopped after {TIMEOUT:g} seconds. Narrow the path or include."
    return found.errors or f"The search ended with exit code {found.exit_code}."
