"""The tools of an MCP server, over a connection that is reestablished when it is lost."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import hashlib
import importlib
import json
import re
from typing import TYPE_CHECKING, Any

from smokebox.agents.tools.output import as_result, image_type
from smokebox.agents.tools.tool import Tool, ToolContext, ToolImage, ToolResult, failure
from smokebox.errors import MissingDependency, ServiceUnavailable

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock
    from mcp_types import Tool as RemoteTool

    from smokebox.agents.tools.mcp.connection import MCPConnection
    from smokebox.agents.tools.mcp.server import MCPServer
    from smokebox.sandbox.api import SandboxApi

MAX_PAGES = 100
_MAX_NAME = 64
_SESSION_LOST = "Session terminated"
_CONNECTION = "smokebox.agents.tools.mcp.connection"
# A keyword that no schema of a server has.
_CONTEXT = "smokebox_ctx"


class MCPClient:
    """Client of a server. Connects when its tools are first listed."""

    def __init__(self, server: MCPServer, sandbox: SandboxApi | None = None) -> None:
        self.server = server
        self._sandbox = sandbox
        self._connection: MCPConnection | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def tools(self) -> list[Tool]:
        """Return the tools that the server has now. Raises `ServiceUnavailable`."""
        connection = await self._connect()
        client = await connection.client()
        found: list[Tool] = []
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            try:
                async with asyncio.timeout(self.server.connect_timeout):
                    page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            except TimeoutError as error:
                raise self._unavailable("it did not respond in time") from error
            except Exception as error:
                why = ", ".join(filter(None, [str(error), connection.last_error()]))
                raise self._unavailable(f"its tools cannot be listed: {why}") from error
            found += [self._tool(tool) for tool in page.tools if self.server.includes(tool.name)]
            cursor = page.next_cursor
            if cursor is None:
                return found
            if cursor in seen:
                break
            seen.add(cursor)
        raise self._unavailable("its list of tools has no end")

    async def aclose(self) -> None:
        """Disconnect, and stop a server that was started here. Safe to repeat."""
        self._closed = True
        async with self._lock:
            await self._disconnect()

    async def _connect(self) -> MCPConnection:
        async with self._lock:
            if self._closed:
                raise self._unavailable("the connection was closed")
            if self._connection is not None and not self._connection.alive:
                await self._disconnect()
            if self._connection is None:
                self._connection = await _new_connection(self.server, self._sandbox)
                try:
                    await self._connection.client()
                except BaseException:
                    await self._disconnect()
                    raise
            return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    async def _reconnect(self, lost: MCPConnection) -> MCPConnection:
        async with self._lock:
            if self._connection is lost:
                await self._disconnect()
        return await self._connect()

    def _tool(self, remote: RemoteTool) -> Tool:
        name = _tool_name(self.server.name, remote.name)

        async def call(**arguments: object) -> ToolResult:
            ctx = arguments.pop(_CONTEXT)
            assert isinstance(ctx, ToolContext)
            return await self._call(name, remote.name, arguments, ctx)

        return Tool(
            name=name,
            description=remote.description or remote.title or remote.name,
            parameters=remote.input_schema,
            function=call,
            context=_CONTEXT,
        )

    async def _call(
        self, name: str, remote: str, arguments: dict[str, object], ctx: ToolContext
    ) -> ToolResult:
        from mcp.shared.exceptions import MCPError

        connection = await self._connect()
        for last in (False, True):
            try:
                client = await connection.client()
                # Not the timeout of the tool, which would include the time to connect.
                async with asyncio.timeout(self.server.timeout):
                    result = await client.call_tool(remote, arguments, None, _progress(ctx))
                return await _tool_result(name, result, ctx.sandbox)
            except TimeoutError:
                text = f"{name} took longer than {self.server.timeout:g} seconds and was stopped."
                return ToolResult(text=text, is_error=True, timed_out=True)
            except MCPError as error:
                lost = not connection.alive
                if not last and (
                    error.message == _SESSION_LOST or (lost and await connection.refused())
                ):
                    # The server has not seen the call: it was restarted, or does not run.
                    connection = await self._reconnect(connection)
                    continue
                return failure(self._lost(connection) if lost else f"{name}: {error.message}")
            except ServiceUnavailable:
                raise
            except Exception as error:
                # The response violates the protocol or the schema of the tool.
                return failure(f"{name} sent a response that cannot be read: {error}")
        raise AssertionError("unreachable")

    def _lost(self, connection: MCPConnection) -> str:
        return (
            f"the MCP server {self.server.name!r} ended while the call ran. It is unknown whether "
            f"the call had its effect: check before calling again.{connection.last_error_note()}"
        )

    def _unavailable(self, why: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"the MCP server {self.server.name!r} cannot be used: {why}.",
            hint="Check that it runs, or remove it from tools=.",
            service=self.server.name,
        )


async def _new_connection(server: MCPServer, sandbox: SandboxApi | None) -> MCPConnection:
    try:
        # The import takes more than a second: do it outside the event loop.
        module = await asyncio.to_thread(importlib.import_module, _CONNECTION)
    except ImportError as error:
        raise MissingDependency(
            "MCP servers need mcp, which is not installed.",
            hint="Run: pip install 'smokebox[mcp]'",
            package="mcp",
            extra="mcp",
        ) from error
    connection: MCPConnection = module.MCPConnection(server, sandbox)
    return connection


def _progress(ctx: ToolContext) -> Any:
    async def show(progress: float, total: float | None, message: str | None) -> None:
        done = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        ctx.output(f"{done} {message}\n" if message else f"{done}\n")

    return show if ctx.on_output is not None else None


def _tool_name(server: str, tool: str) -> str:
    """Return a unique name that every provider accepts."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{tool}")
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(tool.encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9]}_{digest}"


async def _tool_result(tool: str, result: CallToolResult, sandbox: SandboxApi | None) -> ToolResult:
    """Convert the result of a call; long text is truncated, and kept whole in the workspace."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    images = [part for part in parts if isinstance(part, ToolImage)]
    value = [text, *images] if images and text else images or text
    converted = await as_result(tool, value, sandbox)
    return dataclasses.replace(converted, is_error=converted.is_error or result.is_error)


def _part(block: ContentBlock) -> str | ToolImage:
    match block.type:
        case "text":
            return block.text
        case "image":
            return _decode(block.data, "an image", block.mime_type)
        case "audio":
            return f"[audio, {block.mime_type}: it cannot be played here]"
        case "resource_link":
            about = f": {block.description}" if block.description else ""
            return f"[resource {block.name}, {block.uri}{about}]"
        case "resource":
            resource = block.resource
            if hasattr(resource, "text"):
                return f"{resource.uri}:\n{resource.text}"
            return _decode(resource.blob, str(resource.uri), resource.mime_type or "")


def _decode(data: str, what: str, media_type: str) -> str | ToolImage:
    try:
        decoded = base64.b64decode(data, validate=True)
    except binascii.Error:
        return f"[{what} that is not base64]"
    kind = image_type(decoded)
    if kind is None:
        return f"[{what}: {media_type or 'binary data'}, {len(decoded)} bytes]"
    return ToolImage(media_type=kind, data=decoded)
