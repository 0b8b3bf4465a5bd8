"""Sessions: shells that remember from one command to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.names import random_id
from smokebox.errors import Conflict, InvalidOption, InvalidPath, NotFound, SandboxGone
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.idempotency import Making
from smokebox.types import SessionInfo
from smokebox.wire.answers import Sessions
from smokebox.wire.requests import CreateSession, SetEnv

if TYPE_CHECKING:
    from smokebox.engine.sessions.sessions import Session


@endpoint("GET", "/sandboxes/{id}/sessions")
async def list_all(call: Call) -> Sessions:
    """List the sessions of a sandbox, in the order in which they were made."""
    return Sessions([_info(session) for session in await call.sandbox.sessions.list()])


@endpoint(
    "POST",
    "/sandboxes/{id}/sessions",
    errors=(InvalidOption, InvalidPath, Conflict, SandboxGone),
    status=201,
    slow=True,
)
async def create(call: Call, body: CreateSession) -> SessionInfo:
    """Make a session, whose id `exec` takes as `session`.

    With the header Idempotency-Key it may be repeated, and makes one.
    """

    async def make(id: str) -> SessionInfo:
        session = await call.sandbox.create_session(id, cwd=body.cwd, env=body.env, user=body.user)
        return _info(session)

    async def find(id: str) -> SessionInfo:
        return _info(await call.sandbox.sessions.get(id))

    id = body.id if body.id is not None else f"session-{random_id()}"
    making = Making(kind="session", id=id, find=find, make=make)
    return await call.state.requests.once(call, body, making)


@endpoint("GET", "/sandboxes/{id}/sessions/{session}", errors=(InvalidOption, NotFound))
async def get(call: Call) -> SessionInfo:
    """What is known of a session."""
    return _info(await _session(call))


@endpoint(
    "DELETE", "/sandboxes/{id}/sessions/{session}", errors=(InvalidOption, NotFound), slow=True
)
async def delete(call: Call) -> None:
    """End the shell of a session with all that runs in it, and forget it."""
    await call.sandbox.sessions.delete(call.part("session"))


@endpoint(
    "POST",
    "/sandboxes/{id}/sessions/{session}/env",
    errors=(InvalidOption, NotFound, SandboxGone),
    slow=True,
)
async def set_env(call: Call, body: SetEnv) -> None:
    """Export variables in a session, from its next command on; null unsets one."""
    await (await _session(call)).set_env(body.env)


async def _session(call: Call) -> Session:
    return await call.sandbox.sessions.get(call.part("session"))


def _info(session: Session) -> SessionInfo:
    return SessionInfo(
        id=session.id,
        cwd=session.cwd,
        user=session.user,
        created_at=session.created_at,
        busy=session.busy,
    )


ENDPOINTS = [list_all, create, get, delete, set_env]
