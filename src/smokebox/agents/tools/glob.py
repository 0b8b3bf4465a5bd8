"""The glob tool: finds files by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from smokebox.agents.tools.files import as_given
from smokebox.agents.tools.output import fitting_lines, one_line
from smokebox.agents.tools.tool import Tool, ToolResult
from smokebox.errors import PathNotDirectory

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi


def matches(pattern: str, path: str) -> bool:
    """Whether a relative path is one that `pattern`, without braces, covers.

    A pattern without a slash goes by the name alone, at any depth; one that ends with a
    slash means what is below; `**` crosses directories.
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
        # Repeated, it means the same and would only cost time.
        if parts[1:2] == ["**"]:
            return _match(parts[1:], names)
        return any(_match(parts[1:], names[n:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _match(parts[1:], names[1:])


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
