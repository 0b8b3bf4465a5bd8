"""Sandboxes, and sessions in them: made, looked at, destroyed."""

from __future__ import annotations

import time

import msgspec
from starlette.responses import Response

from smokebox.errors import Conflict, NotFound
from smokebox.server.call import Call
from smokebox.server.compat.ids import (
    check_session,
    engine_id,
    new_id,
    sandbox_of,
    session_name,
)
from smokebox.server.compat.messages import answer, decoded
from smokebox.server.compat.mounts import MountBody, perform
from smokebox.server.compat.pty import close_terminal
from smokebox.server.compat.refusal import Refusal
from smokebox.server.compat.workspace import contained, workspace_path


class CreateBody(msgspec.Struct):
    """What a client may ask for. Times it keeps itself, and says again with each command."""

    mounts: list[MountBody] | None = None


class SessionBody(msgspec.Struct):
    """A session that is to be made."""

    id: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}


async def create(call: Call) -> Response:
    """Make a sandbox under a random id."""
    data = await call.body()
    mounts = decoded(CreateBody, data).mounts if data else None
    id = new_id()
    call.sandbox = await call.host.create(engine_id(id, call.principal.prefix))
    try:
        for one in mounts or ():
            await perform(call, one)
    except BaseException:
        await call.sandbox.destroy()
        raise
    return answer({"id": id})


async def destroy(call: Call) -> Response:
    """Destroy a sandbox with all that is in it. One that is not there is fine."""
    await sandbox_of(call.request).destroy()
    return Response(status_code=204)


async def running(call: Call) -> Response:
    """Whether what was done in a sandbox is still there. Makes none, and wakes none."""
    info = await sandbox_of(call.request).info()
    kept = info is not None and info.status != "destroying"
    # An ephemeral sandbox that sleeps has forgotten its files.
    kept = kept and info is not None and (info.status == "active" or not info.ephemeral)
    return answer({"running": kept})


async def create_session(call: Call) -> Response:
    """Make a session: a shell that remembers from one command to the next."""
    data = await call.body()
    body = decoded(SessionBody, data) if data else SessionBody()
    sandbox = sandbox_of(call.request)
    id = check_session(body.id) if body.id is not None else f"session-{new_id()}"
    cwd = None
    if body.cwd is not None:
        cwd = await contained(sandbox, workspace_path(body.cwd))
    try:
        await sandbox.create_session(session_name(id), cwd=cwd, env=body.env)
    except Conflict as error:
        raise Refusal(409, f"there is a session {id!r} already", "session_error") from error
    return answer({"id": id})


async def delete_session(call: Call) -> Response:
    """End a session, with its terminal and all that it left running."""
    id = check_session(call.part("sid"))
    sandbox = sandbox_of(call.request)
    await close_terminal(sandbox, id)
    try:
        await sandbox.sessions.delete(session_name(id))
    except NotFound as error:
        raise Refusal(404, f"there is no session {id!r}", "session_error") from error
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return answer({"success": True, "sessionId": id, "timestamp": stamp})
