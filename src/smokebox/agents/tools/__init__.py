"""Tools of models: read, write, edit, bash, grep and glob for any sandbox, and `@tool`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.bash import DEFAULT_TIMEOUT, MAX_TIMEOUT, bash_tool
from smokebox.agents.tools.edit import edit_tool
from smokebox.agents.tools.function import FunctionTool, as_tool, as_tools, tool
from smokebox.agents.tools.glob import glob_tool
from smokebox.agents.tools.grep import grep_tool
from smokebox.agents.tools.output import OUTPUT_DIRECTORY, ToolFile
from smokebox.agents.tools.read import read_tool
from smokebox.agents.tools.tool import (
    AbortSignal,
    OnOutput,
    Tool,
    ToolContext,
    ToolImage,
    ToolResult,
    failure,
)
from smokebox.agents.tools.write import write_tool

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

__all__ = [
    "AbortSignal",
    "FunctionTool",
    "OnOutput",
    "Tool",
    "ToolContext",
    "ToolFile",
    "ToolImage",
    "ToolResult",
    "as_tool",
    "as_tools",
    "bash_tool",
    "edit_tool",
    "failure",
    "glob_tool",
    "grep_tool",
    "read_tool",
    "tool",
    "workspace_tools",
    "write_tool",
]


def workspace_tools(
    sandbox: SandboxApi,
    *,
    bash_timeout: float = DEFAULT_TIMEOUT,
    max_bash_timeout: float = MAX_TIMEOUT,
    output_directory: str = OUTPUT_DIRECTORY,
) -> list[Tool]:
    """Return the six tools of a sandbox.

    Args:
        sandbox: Where the tools work.
        bash_timeout: Seconds for a command whose call names no timeout.
        max_bash_timeout: Upper limit of the timeout that a call may name.
        output_directory: Directory in the sandbox for outputs too long to show.
    """
    return [
        read_tool(sandbox),
        write_tool(sandbox),
        edit_tool(sandbox),
        bash_tool(
            sandbox,
            default_timeout=bash_timeout,
            max_timeout=max_bash_timeout,
            output_directory=output_directory,
        ),
        grep_tool(sandbox),
        glob_tool(sandbox),
    ]
