"""Names of the bridge protocol, and what the engine calls the same things."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import secrets
from typing import TYPE_CHECKING

from smokebox.engine.names import LONGEST_ID, RESERVED
from smokebox.errors import Conflict, NotFound
from smokebox.server.compat.refusal import Refusal

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from smokebox.engine import Sandbox

ID = re.compile(r"[a-z2-7]{1,128}")
_SESSION = re.compile(r"(?!.*\.\.)[A-Za-z0-9._-]{1,128}")
# None of these characters is in an id of the protocol, so no hash is the id of another.
_HASHED_SANDBOX, _HASHED_SESSION = "0", "bridge:"
_HASH_LENGTH = 32


def new_id() -> str:
    """An id that nobody has: 16 random bytes in 26 letters and digits."""
    return _base32(secrets.token_bytes(16))


def engine_id(id: str, prefix: str) -> str:
    """What the engine calls a sandbox of whoever has that prefix.

    Ids of the protocol have no hyphen and no 0, so a key that is for a prefix could hardly
    name its sandboxes: all that it names are below its prefix.
    """
    room = LONGEST_ID - len(prefix)
    if len(id) <= room and prefix + id not in RESERVED:
        return prefix + id
    digest = _base32(hashlib.sha256(id.encode()).digest())
    return prefix + _HASHED_SANDBOX + digest[: min(_HASH_LENGTH, room - 1)]


def sandbox_of(connection: HTTPConnection) -> Sandbox:
    """The sandbox that a path names. It is made by the first call that needs it."""
    prefix = connection.scope["smokebox.principal"].prefix
    id = engine_id(str(connection.path_params["id"]), prefix)
    sandbox: Sandbox = connection.scope["smokebox.state"].host.sandbox(id)
    return sandbox


def check_session(id: str) -> str:
    """`id` itself, once it can be the id of a session."""
    if not _SESSION.fullmatch(id):
        raise Refusal(400, "Invalid session ID format")
    return id


def session_asked(connection: HTTPConnection, told: str | None = None) -> str | None:
    """The session that a request is for, by its header or by what its query told."""
    id = connection.headers.get("session-id") or told
    return check_session(id) if id else None


def session_name(id: str) -> str:
    """What the engine calls a session; its names do not begin with a dot or a hyphen."""
    if id[0] not in ".-":
        return id
    return _HASHED_SESSION + hashlib.sha256(id.encode()).hexdigest()


async def open_session(sandbox: Sandbox, id: str) -> str:
    """The engine's name of a session, which is made if it is not there."""
    name = session_name(id)
    try:
        await sandbox.sessions.get(name)
    except NotFound:
        # Or another request has made it since.
        with contextlib.suppress(Conflict):
            await sandbox.create_session(name)
    return name


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().lower().rstrip("=")
