"""Tools of MCP servers, over stdio or streamable HTTP.

Needs the extra `mcp`, which is imported when the first server is connected.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.mcp.client import MCPClient
from smokebox.agents.tools.mcp.server import MCPServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from smokebox.agents.tools.tool import Tool
    from smokebox.sandbox.api import SandboxApi

__all__ = ["MCPClient", "MCPServer", "mcp_tools", "open_tools"]


@asynccontextmanager
async def mcp_tools(
    *servers: MCPServer, sandbox: SandboxApi | None = None
) -> AsyncGenerator[list[Tool], None]:
    """Return the tools of servers, which are disconnected at the end of the block.

    Args:
        servers: The servers.
        sandbox: Where servers with `in_sandbox` run.
    """
    async with AsyncExitStack() as resources:
        yield await open_tools(servers, sandbox, resources)


async def open_tools(
    values: Iterable[Tool | MCPServer | Callable[..., object]],
    sandbox: SandboxApi | None,
    resources: AsyncExitStack,
) -> list[Tool]:
    """Return tools, functions and the tools of servers in order; `resources` disconnects.

    Raises:
        ServiceUnavailable: A server cannot be reached.
        Conflict: Two tools have the same name.
    """
    found: list[Tool | Callable[..., object]] = []
    for value in values:
        if isinstance(value, MCPServer):
            client = MCPClient(value, sandbox)
            resources.push_async_callback(client.aclose)
            found += await client.tools()
        else:
            found.append(value)
    return as_tools(found)
