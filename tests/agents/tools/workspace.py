"""The tools of a sandbox, called as a model would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools import ToolResult, workspace_tools

if TYPE_CHECKING:
    from smokebox import SandboxApi


class Workspace:
    """A sandbox and its tools, with methods that expect success or an error."""

    def __init__(self, sandbox: SandboxApi, outputs: str = "/tmp") -> None:
        self.sandbox = sandbox
        tools = workspace_tools(sandbox, output_directory=outputs)
        self.tools = {tool.name: tool for tool in tools}

    async def call(self, tool: str, **arguments: object) -> ToolResult:
        return await self.tools[tool].run(arguments)

    async def text(self, tool: str, **arguments: object) -> str:
        result = await self.call(tool, **arguments)
        assert not result.is_error, result.text
        return result.text

    async def error(self, tool: str, **arguments: object) -> str:
        result = await self.call(tool, **arguments)
        assert result.is_error, result.text
        return result.text

    async def put(self, **files: str | bytes) -> None:
        """Write files by keyword; `__` in a name stands for a dot."""
        for name, data in files.items():
            await self.sandbox.write_file(name.replace("__", "."), data)
