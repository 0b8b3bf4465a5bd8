"""An MCP server's tools as ours, over a connection that is made again when it was lost."""

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
from smokebox.agents.tools.tool import Tool, ToolImage, ToolResult, failure
from smokebox.errors import MissingDependency, ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mcp_types import CallToolResult, ContentBlock
    from mcp_types import Tool as RemoteTool

    from smokebox.agents.tools.mcp.link import MCPLink
    from smokebox.agents.tools.mcp.server import MCPServer
    from smokebox.agents.tools.tool import ToolContext
    from smokebox.sandbox.api import SandboxApi


async def tool_result(tool: str, answer: CallToolResult, sandbox: SandboxApi | None) -> ToolResult:
    """The result of a call, with its images; long text is cut, and kept in the workspace."""
    parts = [_part(block) for block in answer.content]
    if not parts and answer.structured_content is not None:
        parts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    words = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    images = [part for part in parts if isinstance(part, ToolImage)]
    value = [words, *images] if images and words else images or words
    result = await as_result(tool, value, sandbox)
    return dataclasses.replace(result, is_error=result.is_error or answer.is_error)


def _part(block: ContentBlock) -> str | ToolImage:
    match block.type:
        case "text":
            return block.text
        case "image":
            return _decoded(block.data, "an image", block.mime_type)
        case "audio":
            return f"[audio, {block.mime_type}: it cannot be played here]"
        case "resource_link":
            about = f": {block.description}" if block.description else ""
            return f"[resource {block.name}, {block.uri}{about}]"
        case "resource":
            held = block.resource
            if hasattr(held, "text"):
                return f"{held.uri}:\n{held.text}"
            return _decoded(held.blob, str(held.uri), held.mime_type or "")


def _decoded(data: str, what: str, media_type: str) -> str | ToolImage:
    try:
        decoded = base64.b64decode(data, validate=True)
    except binascii.Error:
        return f"[{what} that is not base64]"
    kind = image_type(decoded)
    if kind is None:
        return f"[{what}: {media_type or 'binary data'}, {len(decoded)} bytes]"
    return ToolImage(media_type=kind, data=decoded)


MAX_PAGES = 100
_MOST_LETTERS = 64
_SESSION_LOST = "Session terminated"
_LINK = "smokebox.agents.tools.mcp.link"
_CONTEXT = "smokebox_ctx"


class MCPConnection:
    """A server in use. It is reached when its tools are first asked for."""

    def __init__(self, server: MCPServer, sandbox: SandboxApi | None = None) -> None:
        self.server = server
        self._sandbox = sandbox
        self._link: MCPLink | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def tools(self) -> list[Tool]:
        """The tools that the server has now. Raises `ServiceUnavailable`."""
        link = await self._alive()
        client = await link.client()
        found: list[Tool] = []
        cursor: str | None = None
        seen: set[str] = set()
        for _ in range(MAX_PAGES):
            try:
                page = await self._timely(client.list_tools(cursor=cursor, cache_mode="bypass"))
            except ServiceUnavailable:
                raise
            except Exception as error:
                why = ", ".join(filter(None, [str(error), link.complaint()]))
                raise self._unavailable(f"its tools cannot be listed: {why}") from error
            found += [self._tool(tool) for tool in page.tools if self.server.takes(tool.name)]
            cursor = page.next_cursor
            if cursor is None:
                return found
            if cursor in seen:
                break
            seen.add(cursor)
        raise self._unavailable("its list of tools has no end")

    async def aclose(self) -> None:
        """End the connection, and the process if it was one of ours. Safe to repeat."""
        self._closed = True
        async with self._lock:
            if self._link is not None:
                await self._link.aclose()
                self._link = None

    async def _alive(self) -> MCPLink:
        async with self._lock:
            if self._closed:
                raise self._unavailable("the connection was closed")
            if self._link is not None and not self._link.alive:
                await self._link.aclose()
                self._link = None
            if self._link is None:
                self._link = await _new_link(self.server, self._sandbox)
                try:
                    await self._link.client()
                except BaseException:
                    await self._link.aclose()
                    self._link = None
                    raise
            return self._link

    def _tool(self, remote: RemoteTool) -> Tool:
        name = _name(self.server.name, remote.name)

        async def call(ctx: ToolContext, **arguments: object) -> ToolResult:
            return await self._call(name, remote.name, arguments, ctx)

        return Tool(
            name=name,
            description=remote.description or remote.title or remote.name,
            parameters=remote.input_schema,
            function=_with_context(call),
            context=_CONTEXT,
        )

    async def _call(
        self, name: str, remote: str, arguments: dict[str, object], ctx: ToolContext
    ) -> ToolResult:
        from mcp.shared.exceptions import MCPError

        from smokebox.agents.tools.mcp.connection import tool_result

        link = await self._alive()
        for last in (False, True):
            try:
                client = await link.client()
                # Not the tool's own timeout, which would count the way to the server too.
                async with asyncio.timeout(self.server.timeout):
                    answer = await client.call_tool(remote, arguments, None, _progress(ctx))
                return await tool_result(name, answer, ctx.sandbox)
            except TimeoutError:
                said = f"{name} took longer than {self.server.timeout:g} seconds and was stopped."
                return ToolResult(text=said, is_error=True, timed_out=True)
            except MCPError as error:
                lost = not link.alive
                if not last and (error.message == _SESSION_LOST or await _unsent(link)):
                    # The server has not seen the call: it was started anew, or is not there.
                    link = await self._renewed(link)
                    continue
                return failure(await self._lost(link) if lost else f"{name}: {error.message}")
            except ServiceUnavailable:
                raise
            except Exception as error:
                # An answer that is not what the protocol, or the tool's own schema, says.
                return failure(f"{name} answered what cannot be read: {error}")
        raise AssertionError("unreachable")

    async def _renewed(self, link: MCPLink) -> MCPLink:
        async with self._lock:
            if self._link is link:
                await link.aclose()
                self._link = None
        return await self._alive()

    async def _lost(self, link: MCPLink) -> str:
        complaint = link.complaint()
        wrote = f" Last heard of it: {complaint}." if complaint else ""
        return (
            f"the MCP server {self.server.name!r} ended while the call ran. Whether the call had "
            f"its effect is unknown: look before calling again.{wrote}"
        )

    async def _timely(self, page: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self.server.connect_timeout):
                return await page
        except TimeoutError as error:
            raise self._unavailable("it did not answer in time") from error

    def _unavailable(self, why: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"the MCP server {self.server.name!r} cannot be used: {why}.",
            hint="See that it runs, or leave it out of tools=.",
            service=self.server.name,
        )


def _with_context(call: Callable[..., Awaitable[ToolResult]]) -> Callable[..., Any]:
    """Takes the context by a keyword that no schema has."""

    async def function(**arguments: object) -> ToolResult:
        return await call(arguments.pop(_CONTEXT), **arguments)

    return function


async def _new_link(server: MCPServer, sandbox: SandboxApi | None) -> MCPLink:
    try:
        # A second and more of imports, during which others want to go on.
        module = await asyncio.to_thread(importlib.import_module, _LINK)
    except ImportError as error:
        raise MissingDependency(
            "MCP servers need mcp, which is not installed.",
            hint="Run: pip install 'smokebox[mcp]'",
            package="mcp",
            extra="mcp",
        ) from error
    link: MCPLink = module.MCPLink(server, sandbox)
    return link


async def _unsent(link: MCPLink) -> bool:
    return not link.alive and await link.refused()


def _progress(ctx: ToolContext) -> Any:
    async def show(progress: float, total: float | None, message: str | None) -> None:
        far = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        ctx.output(f"{far} {message}\n" if message else f"{far}\n")

    return show if ctx.on_output is not None else None


def _name(server: str, tool: str) -> str:
    """A name that every provider takes, and that is another for each tool."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{tool}")
    if len(name) <= _MOST_LETTERS:
        return name
    digest = hashlib.sha256(tool.encode()).hexdigest()[:8]
    return f"{name[: _MOST_LETTERS - 9]}_{digest}"
