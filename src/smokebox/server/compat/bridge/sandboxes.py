"""Sandboxes, their sessions and tunnels, and the pool of sandboxes created ahead."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import msgspec

from smokebox.errors import Conflict, NotFound
from smokebox.server.compat.bridge.errors import BridgeError
from smokebox.server.compat.bridge.mounts import MountBody, mount_bucket
from smokebox.server.compat.bridge.names import (
    check_session,
    engine_id,
    random_bridge_id,
    resolve_contained,
    sandbox_of,
    session_name,
    workspace_path,
)
from smokebox.server.compat.bridge.route import Ok, bridge_route
from smokebox.server.compat.bridge.terminal import close_terminal
from smokebox.server.endpoint import ApiCall
from smokebox.server.previews import urls

_SANDBOX = "/v1/sandbox/{id}"
_TUNNEL = f"{_SANDBOX}/tunnel/{{port}}"


class CreateBody(msgspec.Struct):
    """Buckets to mount in the sandbox. Timeouts are ignored: they come with each command."""

    mounts: list[MountBody] | None = None


class CreatedId(msgspec.Struct):
    """The id of a new sandbox or session."""

    id: str


class SandboxRunning(msgspec.Struct):
    """True if a sandbox still has its files."""

    running: bool


class SessionBody(msgspec.Struct):
    """A session to create. Without `id` it gets a random one."""

    id: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}


class DeletedSession(msgspec.Struct, rename="camel", kw_only=True):
    """A session that was closed."""

    success: bool = True
    session_id: str
    timestamp: str


class TunnelBody(msgspec.Struct):
    """A tunnel to create."""

    name: str | None = None


class TunnelInfo(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A port that is exposed at a URL."""

    id: str
    port: int
    url: str
    hostname: str
    created_at: str
    name: str | None = None


class PoolConfig(msgspec.Struct, rename="camel"):
    """Settings of the pool. It is refilled at once, so its interval is 0."""

    warm_target: int
    refresh_interval: int = 0


class PoolStats(msgspec.Struct, rename="camel", kw_only=True):
    """Numbers of sandboxes: created ahead (`warm`) and running (`assigned`)."""

    warm: int
    assigned: int
    total: int
    config: PoolConfig
    max_instances: int | None = None


@bridge_route("POST", "/v1/sandbox", "createSandbox", errors=(400, 502))
async def create(call: ApiCall, body: CreateBody) -> CreatedId:
    """Create a sandbox with a random id."""
    id = random_bridge_id()
    call.sandbox = await call.host.create(engine_id(id, call.principal.prefix))
    try:
        for mount in body.mounts or ():
            await mount_bucket(call, mount)
    except BaseException:
        await call.sandbox.destroy()
        raise
    return CreatedId(id)


@bridge_route("DELETE", _SANDBOX, "deleteSandbox", status=204)
async def destroy(call: ApiCall) -> None:
    """Destroy a sandbox and its files. Succeeds if there is none."""
    await sandbox_of(call.request).destroy()


@bridge_route("GET", f"{_SANDBOX}/running", "isSandboxRunning")
async def running(call: ApiCall) -> SandboxRunning:
    """Check that a sandbox still has its files, without creating or waking it."""
    info = await sandbox_of(call.request).info()
    if info is None or info.status == "destroying":
        return SandboxRunning(False)
    # A sleeping ephemeral sandbox has lost its files.
    return SandboxRunning(info.status == "active" or not info.ephemeral)


@bridge_route("POST", f"{_SANDBOX}/session", "createSession", errors=(400, 403, 409))
async def create_session(call: ApiCall, body: SessionBody) -> CreatedId:
    """Create a session: a shell that keeps its state between commands."""
    sandbox = sandbox_of(call.request)
    id = check_session(body.id) if body.id is not None else f"session-{random_bridge_id()}"
    cwd = None
    if body.cwd is not None:
        cwd = await resolve_contained(sandbox, workspace_path(body.cwd))
    try:
        await sandbox.create_session(session_name(id), cwd=cwd, env=body.env)
    except Conflict as error:
        raise BridgeError(409, f"session {id!r} already exists", "session_error") from error
    return CreatedId(id)


@bridge_route("DELETE", f"{_SANDBOX}/session/{{sid}}", "deleteSession", errors=(400, 404))
async def delete_session(call: ApiCall) -> DeletedSession:
    """Close a session with its terminal and its processes."""
    id = check_session(call.path_param("sid"))
    sandbox = sandbox_of(call.request)
    await close_terminal(sandbox, id)
    try:
        await sandbox.sessions.delete(session_name(id))
    except NotFound as error:
        raise BridgeError(404, f"there is no session {id!r}", "session_error") from error
    return DeletedSession(session_id=id, timestamp=_now())


@bridge_route("POST", _TUNNEL, "createTunnel", errors=(400, 409))
async def create_tunnel(call: ApiCall, body: TunnelBody) -> TunnelInfo:
    """Expose a port at a preview URL. Safe to repeat."""
    call.sandbox = sandbox_of(call.request)
    exposed = await call.sandbox.ports.expose(_port(call), name=body.name)
    url = (await urls.exposed_port(call, exposed)).url
    return TunnelInfo(
        id=f"{exposed.port}-{exposed.slug}",
        port=exposed.port,
        url=url,
        hostname=urlsplit(url).hostname or "",
        created_at=_now(),
        name=exposed.name,
    )


@bridge_route("DELETE", _TUNNEL, "deleteTunnel", status=204, errors=(400,))
async def delete_tunnel(call: ApiCall) -> None:
    """Remove the preview URL of a port. Succeeds if there is none."""
    await sandbox_of(call.request).ports.unexpose(_port(call))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _port(call: ApiCall) -> int:
    text = call.path_param("port")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise BridgeError(400, f"Invalid port: {text}")
    return int(text)


@bridge_route("GET", "/v1/pool/stats", "getPoolStats", errors=(403,))
async def pool_stats(call: ApiCall) -> PoolStats:
    """Count the sandboxes created ahead and the running ones."""
    call.principal.check_admin()
    pool = call.host.pool
    assigned = len(await call.host.list(status="active"))
    return PoolStats(
        warm=pool.ready,
        assigned=assigned,
        total=pool.ready + assigned,
        config=PoolConfig(warm_target=pool.size),
    )


@bridge_route("POST", "/v1/pool/prime", "primePool", errors=(403,))
async def prime_pool(call: ApiCall) -> Ok:
    """Create sandboxes until the pool is full."""
    call.principal.check_admin()
    await call.host.prime()
    return Ok()


@bridge_route("POST", "/v1/pool/shutdown-prewarmed", "shutdownPrewarmed", errors=(403,))
async def empty_pool(call: ApiCall) -> Ok:
    """Remove the sandboxes created ahead. Creating the next sandbox fills the pool again."""
    call.principal.check_admin()
    await call.host.pool.empty()
    return Ok()
