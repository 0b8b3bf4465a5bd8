"""The write tool: creates or replaces a whole file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.files import path_lock
from smokebox.agents.tools.tool import Tool, ToolResult
from smokebox.errors import PathIsDirectory

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

DESCRIPTION = """\
Write a whole file, creating its parent directories. An existing file is replaced; use edit to \
change a part of it."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {
            "type": "string",
            "description": "File to write; a relative path starts at the working directory.",
        },
        "content": {"type": "string", "description": "The whole content of the file."},
    },
    "required": ["path", "content"],
    "additionalProperties": False,
}


def write_tool(sandbox: SandboxApi) -> Tool:
    """Return the tool `write` for a sandbox."""

    async def write(path: str, content: str) -> ToolResult:
        data = content.encode()
        async with path_lock(sandbox, path):
            replaced = await _describe_replaced(sandbox, path)
            await sandbox.write_file(path, data)
        return ToolResult(text=f"Wrote {len(data)} bytes to {path}{replaced}.")

    return Tool(name="write", description=DESCRIPTION, parameters=PARAMETERS, function=write)


async def _describe_replaced(sandbox: SandboxApi, path: str) -> str:
    """Return the part of the result about the file that is replaced, or ""."""
    if not await sandbox.exists(path):
        return ""
    info = await sandbox.stat(path)
    if info.is_directory:
        raise PathIsDirectory(path, hint="Name a file in it.")
    if info.size is None:
        return ", replacing the existing file"
    return f", replacing {info.size} bytes"
