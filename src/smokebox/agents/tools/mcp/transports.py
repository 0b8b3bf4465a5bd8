"""The ways to a server: a process of this host, one in a sandbox, or HTTP."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import httpx2
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from smokebox.agents.tools.mcp.pipe import Starter, pipe
from smokebox.agents.view import View
from smokebox.errors import Unsupported
from smokebox.sandbox.local import LocalSandbox

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from mcp.client._transport import TransportStreams

    from smokebox.agents.tools.mcp.diagnosis import Complaints
    from smokebox.agents.tools.mcp.server import MCPServer, Token
    from smokebox.sandbox.api import SandboxApi


def transport(
    server: MCPServer, sandbox: SandboxApi | None, complaints: Complaints
) -> AbstractAsyncContextManager[TransportStreams]:
    """The way to a server. Raises `Unsupported` for a sandbox that has no processes."""
    if server.url is not None:
        return _http(server, complaints)
    if not server.in_sandbox:
        return _host(server, server.cwd, dict(server.env or {}), complaints)
    # A view has no processes of its own, and says where those of its sandbox begin.
    machine = sandbox._sandbox if isinstance(sandbox, View) else sandbox
    cwd = "." if sandbox is None else sandbox.resolve_path(server.cwd or ".")
    if isinstance(machine, LocalSandbox):
        return _host(server, cwd, dict(server.env or {}), complaints)
    if not hasattr(machine, "start_process"):
        raise Unsupported(
            f"the MCP server {server.name!r} is to run in the sandbox, and this one has no "
            "processes.",
            hint="Use a Linux sandbox (get_sandbox), or leave in_sandbox out.",
            operation="start_process",
            sandbox=type(machine).__name__,
        )
    starter = cast("Starter", machine)
    return pipe(starter, server.words, cwd=cwd, env=server.env, complaints=complaints)


def _host(
    server: MCPServer, cwd: str | None, env: dict[str, str], complaints: Complaints
) -> AbstractAsyncContextManager[TransportStreams]:
    program, *arguments = server.words
    parameters = StdioServerParameters(command=program, args=arguments, env=env, cwd=cwd)
    return stdio_client(parameters, errlog=complaints.file())


@asynccontextmanager
async def _http(
    server: MCPServer, complaints: Complaints
) -> AsyncGenerator[TransportStreams, None]:
    auth = None if server.token is None else _Bearer(server.token)
    headers = dict(server.headers or {})

    async def note(response: httpx2.Response) -> None:
        # The library tells of an error, and not which.
        if response.status_code >= 400:
            complaints.add(f"HTTP {response.status_code} {response.reason_phrase}\n")

    async with (
        create_mcp_http_client(headers=headers, auth=auth) as client,
        streamable_http_client(str(server.url), http_client=client) as streams,
    ):
        client.event_hooks["response"].append(note)
        yield streams


class _Bearer(httpx2.Auth):
    """Asks for a token with each request, and for another one when it is refused."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        request.headers["Authorization"] = f"Bearer {await self._ask()}"
        response = yield request
        if response.status_code == 401 and callable(self._token):
            request.headers["Authorization"] = f"Bearer {await self._ask()}"
            yield request

    async def _ask(self) -> str:
        if isinstance(self._token, str):
            return self._token
        given: Any = self._token()
        return str(await given if inspect.isawaitable(given) else given)
