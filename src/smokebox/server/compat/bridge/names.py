"""Ids and paths of the bridge protocol, translated to those of the engine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import posixpath
import re
import secrets
from typing import TYPE_CHECKING

from smokebox.engine.names import LONGEST_ID, RESERVED
from smokebox.errors import Conflict, NotFound, PathError, PathNotFound
from smokebox.server.compat.bridge.errors import BridgeError

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from smokebox.engine import Sandbox

ID = re.compile(r"[a-z2-7]{1,128}")
SESSION = re.compile(r"(?!.*\.\.)[A-Za-z0-9._-]{1,128}")
# None of these characters is in an id of the protocol, so no hash is the id of another.
_HASHED_SANDBOX, _HASHED_SESSION = "0", "bridge:"
_HASH_LENGTH = 32


def random_bridge_id() -> str:
    """Return a random id of this protocol: 16 bytes as 26 letters and digits."""
    return _base32(secrets.token_bytes(16))


def engine_id(id: str, prefix: str) -> str:
    """Return the engine's id of a sandbox for a key with that prefix.

    Ids of the protocol have no hyphen, so most prefixes cannot be part of them. Each id is
    therefore appended to the prefix of its key.
    """
    room = LONGEST_ID - len(prefix)
    if len(id) <= room and prefix + id not in RESERVED:
        return prefix + id
    digest = _base32(hashlib.sha256(id.encode()).digest())
    return prefix + _HASHED_SANDBOX + digest[: min(_HASH_LENGTH, room - 1)]


def sandbox_of(connection: HTTPConnection) -> Sandbox:
    """Return the sandbox in the path. The first call that needs it creates it."""
    prefix = connection.scope["smokebox.principal"].prefix
    id = engine_id(str(connection.path_params["id"]), prefix)
    sandbox: Sandbox = connection.scope["smokebox.state"].host.sandbox(id)
    return sandbox


def check_session(id: str) -> str:
    """Return `id` if it is a valid id of a session."""
    if not SESSION.fullmatch(id):
        raise BridgeError(400, "Invalid session ID format")
    return id


def requested_session(connection: HTTPConnection, query: str | None = None) -> str | None:
    """Return the session id in the header of a request, else the one in its query."""
    id = connection.headers.get("session-id") or query
    return check_session(id) if id else None


def session_name(id: str) -> str:
    """Return the engine's name of a session; those do not begin with a dot or a hyphen."""
    if id[0] not in ".-":
        return id
    return _HASHED_SESSION + hashlib.sha256(id.encode()).hexdigest()


async def open_session(sandbox: Sandbox, id: str) -> str:
    """Return the engine's name of a session, and create the session if needed."""
    name = session_name(id)
    try:
        await sandbox.sessions.get(name)
    except NotFound:
        # Another request may have created it since.
        with contextlib.suppress(Conflict):
            await sandbox.create_session(name)
    return name


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().lower().rstrip("=")


WORKSPACE = "/workspace"
_MOST_LINKS = 40


def workspace_path(path: str) -> str:
    """Normalize a path, relative to the workspace, and refuse one outside of it."""
    whole = posixpath.normpath(posixpath.join(WORKSPACE, path))
    return _check_contained(f"/{whole.lstrip('/')}")


async def resolve_contained(sandbox: Sandbox, path: str) -> str:
    """Resolve the symlinks of a path, and refuse one that leads out of the workspace.

    Programs in the sandbox can change links afterwards. This keeps a client from leaving the
    workspace by mistake; it does not protect the sandbox from itself.
    """
    resolved, remaining, links = "/", _reversed_names(path), 0
    while remaining:
        name = remaining.pop()
        if name == "..":
            resolved = posixpath.dirname(resolved)
            continue
        step = posixpath.join(resolved, name)
        try:
            target = await sandbox.files.readlink(step)
        except PathNotFound:
            return _check_contained(posixpath.normpath(posixpath.join(step, *reversed(remaining))))
        except PathError:
            # Not a link: a file, a directory, or something unreadable.
            resolved = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise BridgeError(403, f"{path} leads through too many links")
        resolved = "/" if target.startswith("/") else resolved
        remaining += _reversed_names(target)
    return _check_contained(resolved)


def _reversed_names(path: str) -> list[str]:
    """Return the names on a path in reverse order."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _check_contained(path: str) -> str:
    if path != WORKSPACE and not path.startswith(f"{WORKSPACE}/"):
        raise BridgeError(403, "path must resolve to a location within /workspace")
    return path
