"""The tools of MCP servers, over standard input and output or streamable HTTP.

Needs the extra `mcp`, which is imported when the first server is reached.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.mcp.connection import MCPConnection
from smokebox.agents.tools.mcp.server import MCPServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from smokebox.agents.tools.tool import Tool
    from smokebox.sandbox.api import SandboxApi

__all__ = ["MCPConnection", "MCPServer", "mcp_tools", "open_tools"]


@asynccontextmanager
async def mcp_tools(
    *servers: MCPServer, sandbox: SandboxApi | None = None
) -> AsyncGenerator[list[Tool], None]:
    """The tools of servers, which are let go of at the end of the block.

    `sandbox` is where those run that are `in_sandbox`.
    """
    async with AsyncExitStack() as opened:
        yield await open_tools(servers, sandbox, opened)


async def open_tools(
    values: Iterable[Tool | MCPServer | Callable[..., object]],
    sandbox: SandboxApi | None,
    opened: AsyncExitStack,
) -> list[Tool]:
    """Tools, functions and servers as tools, in their order; `opened` lets go of the servers.

    Raises `ServiceUnavailable` for a server that is not there, and `Conflict` for two tools of
    one name.
    """
    found: list[Tool | Callable[..., object]] = []
    for value in values:
        if isinstance(value, MCPServer):
            connection = MCPConnection(value, sandbox)
            opened.push_async_callback(connection.aclose)
            found += await connection.tools()
        else:
            found.append(value)
    return as_tools(found)
