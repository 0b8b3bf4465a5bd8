"""The tools a model works with: the six of any sandbox (read, write, edit, bash, grep and
glob), and functions that `@tool` makes into tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.bash import DEFAULT_TIMEOUT, MAX_TIMEOUT, OUTPUT_DIRECTORY, bash_tool
from smokebox.agents.tools.edit import edit_tool
from smokebox.agents.tools.function import FunctionTool, as_tool, as_tools, tool
from smokebox.agents.tools.glob import glob_tool
from smokebox.agents.tools.grep import grep_tool
from smokebox.agents.tools.output import ToolFile
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
    """The six tools over `sandbox`, in the order in which a model is told of them.

    `bash_timeout` holds where the model names none, and it cannot go above
    `max_bash_timeout`. Outputs too long to show are kept in `output_directory`.
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
