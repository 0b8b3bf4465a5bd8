"""The glob tool: finds files by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from smokebox.agents.tools.files import path_formatter
from smokebox.agents.tools.output import count_fitting, one_line
from smokebox.agents.tools.tool import Tool, ToolResult
from smokebox.errors import PathNotDirectory

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi


def matches(pattern: str, path: str) -> bool:
    """Return True if a relative path matches `pattern`, which has no braces.

    A pattern without a slash matches the name alone, at any depth. One that ends with a slash
    matches everything below. `**` crosses directories.
    """
    names = path.split("/")
    if "/" not in pattern:
        return fnmatchcase(names[-1], pattern)
    parts = f"{pattern}**" if pattern.endswith("/") else pattern
    return _match(parts.removeprefix("./").lstrip("/").split("/"), names)


def _match(parts: list[str], names: list[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        # A repeated `**` means the same, but takes exponential time.
        if parts[1:2] == ["**"]:
            return _match(parts[1:], names)
        return any(_match(parts[1:], names[n:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _match(parts[1:], names[1:])


MAX_RESULTS = 1000

DESCRIPTION = f"""\
Find files by name, sorted by path, at most {MAX_RESULTS}. In the pattern `*` and `?` stay within \
a name, `**` crosses directories, `[abc]` is one of these characters and `{{a,b}}` either word: \
`**/*.py`, `src/*.{{ts,tsx}}`. Files whose name starts with a dot are found only by a pattern \
with the dot."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "minLength": 1, "description": "For example `**/*.py`."},
        "path": {
            "type": "string",
            "description": "Directory to search in. Default: the working directory.",
        },
    },
    "required": ["pattern"],
    "additionalProperties": False,
}


def glob_tool(sandbox: SandboxApi) -> Tool:
    """Return the tool `glob` for a sandbox."""

    async def glob(pattern: str, path: str = ".") -> ToolResult:
        found = await sandbox.glob(pattern, cwd=path, files_only=True)
        if not found:
            # The path may be wrong.
            if not (await sandbox.stat(path)).is_directory:
                hint = "Pass the directory as path, the name as pattern."
                raise PathNotDirectory(path, hint=hint)
            return ToolResult(text="No files found matching pattern.")
        lines = list(map(one_line, map(path_formatter(sandbox, path), found)))
        shown = count_fitting(lines, MAX_RESULTS)
        text = "\n".join(lines[:shown])
        if shown < len(lines):
            text += f"\n\n[Showing {shown} of {len(lines)} files. Narrow the pattern or path.]"
        return ToolResult(text=text)

    return Tool(name="glob", description=DESCRIPTION, parameters=PARAMETERS, function=glob)
