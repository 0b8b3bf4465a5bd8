"""The glob tool: finds files by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.files import as_given
from smokebox.agents.tools.tool import Tool, ToolResult
from smokebox.agents.tools.truncation import fitting_lines, one_line
from smokebox.errors import PathNotDirectory

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

MAX_RESULTS = 1000

DESCRIPTION = f"""\
Find files by name, sorted by path, at most {MAX_RESULTS}. In the pattern `*` and `?` stay within \
a name, `**` crosses directories, `[abc]` is one of some characters and `{{a,b}}` either word: \
`**/*.py`, `src/*.{{ts,tsx}}`. Files whose name starts with a dot are found only by a pattern \
that writes the dot."""

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
    """`glob`, over `sandbox`."""

    async def glob(pattern: str, path: str = ".") -> ToolResult:
        found = await sandbox.glob(pattern, cwd=path, files_only=True)
        # An empty answer is the only one in which a wrong path could hide.
        if not found and not (await sandbox.stat(path)).is_directory:
            raise PathNotDirectory(path, hint="Give the directory as path, the name as pattern.")
        return _listing(list(map(as_given(sandbox, path), found)))

    return Tool(name="glob", description=DESCRIPTION, parameters=PARAMETERS, function=glob)


def _listing(paths: list[str]) -> ToolResult:
    if not paths:
        return ToolResult(text="No files found matching pattern.")
    lines = [one_line(path) for path in paths]
    shown = fitting_lines(lines, MAX_RESULTS)
    text = "\n".join(lines[:shown])
    if shown < len(lines):
        text += f"\n\n[Showing {shown} of {len(lines)} files. Narrow the pattern or path.]"
    return ToolResult(text=text)
