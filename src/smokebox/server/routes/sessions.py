"""Sessions: shells that keep their state between commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.names import random_id
from smokebox.errors import Conflict, InvalidOption, InvalidPath, NotFound, SandboxGone
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.idempotency import Creation
from smokebox.types import SessionInfo
from smokebox.wire.requests import CreateSession, SetEnv
from smokebox.wire.responses import Sessions

if TYPE_CHECKING:
    from smokebox.engine.sessions.session import ShellSession


@endpoint("GET", "/sandboxes/{id}/sessions")
async def list_all(call: ApiCall) -> Sessions:
    """List the sessions of a sandbox, in order of creation."""
    return Sessions([_info(session) for session in await call.sandbox.sessions.list()])


@endpoint(
    "POST",
    "/sandboxes/{id}/sessions",
    errors=(InvalidOption, InvalidPath, Conflict, SandboxGone),
    status=201,
    slow=True,
)
async def create(call: ApiCall, body: CreateSession) -> SessionInfo:
    """Create a session. Pass its id to `exec` as `session`.

    With the header Idempotency-Key the request may be repeated, and creates one session.
    """

    async def create_with_id(id: str) -> SessionInfo:
        session = await call.sandbox.create_session(id, cwd=body.cwd, env=body.env, user=body.user)
        return _info(session)

    async def find(id: str) -> SessionInfo:
        return _info(await call.sandbox.sessions.get(id))

    id = body.id if body.id is not None else f"session-{random_id()}"
    return await call.state.idempotency.once(
        call, body, Creation(kind="session", id=id, find=find, create=create_with_id)
    )


@endpoint("GET", "/sandboxes/{id}/sessions/{session}", errors=(InvalidOption, NotFound))
async def get(call: ApiCall) -> SessionInfo:
    """Return the state of a session."""
    return _info(await _session(call))


@endpoint(
    "DELETE", "/sandboxes/{id}/sessions/{session}", errors=(InvalidOption, NotFound), slow=True
)
async def delete(call: ApiCall) -> None:
    """Close a session and kill the processes in it."""
    await call.sandbox.sessions.delete(call.path_param("session"))


@endpoint(
    "POST",
    "/sandboxes/{id}/sessions/{session}/env",
    errors=(InvalidOption, NotFound, SandboxGone),
    slow=True,
)
async def set_env(call: ApiCall, body: SetEnv) -> None:
    """Set environment variables of a session, for its next commands; null unsets one."""
    await (await _session(call)).set_env(body.env)


async def _session(call: ApiCall) -> ShellSession:
    return await call.sandbox.sessions.get(call.path_param("session"))


def _info(session: ShellSession) -> SessionInfo:
    return SessionInfo(
        id=session.id,
        cwd=session.cwd,
        user=session.user,
        created_at=session.created_at,
        busy=session.busy,
    )


ENDPOINTS = [list_all, create, get, delete, set_env]
