"""An MCP server for tests: `stdio`, or `http PORT`, which prints the port.

Over HTTP it requires the bearer token in TOKEN, if that is set.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from starlette.responses import PlainTextResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
server = MCPServer("tests", log_level="ERROR")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def about() -> str:
    """Return the process id, the working directory and a variable."""
    return f"{os.getpid()} {os.getcwd()} {os.environ.get('COLOUR', '')}"


@server.tool(name="files.read/all")
def oddly_named() -> str:
    """Have a name that no provider accepts."""
    return "read"


@server.tool()
def picture() -> Image:
    """Return an image."""
    return Image(data=PNG, format="png")


@server.tool()
def resource() -> CallToolResult:
    """Return text and a resource."""
    resource = TextResourceContents(uri="memo://1", text="inside", mime_type="text/plain")
    text = TextContent(type="text", text="words")
    return CallToolResult(content=[text, EmbeddedResource(type="resource", resource=resource)])


@server.tool()
def fail() -> str:
    """Raise a tool error."""
    raise ToolError("the disk is full")


@server.tool()
def refuse() -> str:
    """Raise a protocol error."""
    raise MCPError(-32050, "not today")


@server.tool()
async def slow(marker: str, ctx: Context) -> str:
    """Run until cancelled, and report progress."""
    await ctx.report_progress(1, 3, "step")
    try:
        await anyio.sleep(600)
    finally:
        Path(marker).write_text("cancelled")
    return "done"


@server.tool()
def die() -> str:
    """Exit during a call."""
    sys.stderr.write("out of memory\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def long() -> str:
    """Return long text."""
    return "x" * 200_000


class RequireToken:
    """Middleware that requires a token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if headers.get(b"authorization") != self._expected:
                await PlainTextResponse("no", 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def serve_http(port: int, *, stateless: bool) -> None:
    app: ASGIApp = server.streamable_http_app(stateless_http=stateless)
    if token := os.environ.get("TOKEN"):
        app = RequireToken(app, token)
    import uvicorn

    listening = socket.create_server(("127.0.0.1", port))
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["http", port]:
            serve_http(int(port), stateless=False)
        case ["stdio"]:
            server.run("stdio")
