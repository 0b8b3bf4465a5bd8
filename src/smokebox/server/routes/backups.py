"""Backups of directories, which outlive the sandboxes that they are of."""

from __future__ import annotations

from typing import Any

from smokebox.engine.backups.backups import random_backup_id
from smokebox.engine.names import check_id
from smokebox.errors import (
    BadSnapshot,
    BucketNotFound,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidOption,
    InvalidPath,
    LimitReached,
    MissingDependency,
    NotFound,
    PathError,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.idempotency import Making
from smokebox.types import Backup, RestoredBackup
from smokebox.wire.answers import Backups, BackupsUnderWay
from smokebox.wire.requests import CreateBackup, ListBackups, RestoreBackup

_KEPT = (ServiceUnavailable, BucketNotFound, PathError, MissingDependency)
_WORK = (
    *_KEPT,
    InvalidOption,
    InvalidPath,
    NotFound,
    Conflict,
    LimitReached,
    DeadlineExceeded,
    SandboxGone,
    Unsupported,
)


@endpoint("POST", "/sandboxes/{id}/backups", errors=_WORK, status=201, slow=True)
async def create(call: Call, body: CreateBackup) -> Backup:
    """Keep what is in a directory of a sandbox at this moment.

    It outlives the sandbox, until it is deleted or its `ttl` is over. Closing the connection
    breaks it off, and nothing is left of it then. With the header Idempotency-Key it may be
    repeated, and makes one.
    """

    async def make(id: str) -> Backup:
        return await call.sandbox.backups.create(
            body.path,
            id=id,
            name=body.name,
            ttl=body.ttl,
            excludes=body.excludes,
            gitignore=body.gitignore,
            freeze=body.freeze,
            **_given(compression=body.compression, timeout=body.timeout),
        )

    making = Making(kind="backup", id=random_backup_id(), find=call.host.backups.get, make=make)
    return await call.state.requests.once(call, body, making)


@endpoint(
    "POST",
    "/sandboxes/{id}/backups/{backup}/restore",
    errors=(*_WORK, BadSnapshot, Forbidden),
    slow=True,
)
async def restore(call: Call, body: RestoreBackup) -> RestoredBackup:
    """Have a directory of a sandbox be what a backup has of it, or leave it as it is.

    The backup may be of any sandbox that is for who asks. What the directory has besides is
    gone then.
    """
    backup = await _backup(call)
    return await call.sandbox.backups.restore(
        backup, path=body.path, **_given(timeout=body.timeout)
    )


@endpoint("GET", "/sandboxes/{id}/backups/progress")
async def progress(call: Call) -> BackupsUnderWay:
    """How far the backups of a sandbox are that are being made or restored."""
    return BackupsUnderWay(call.sandbox.backups.progress())


@endpoint("GET", "/backups", errors=(InvalidOption,))
async def list_all(call: Call, query: ListBackups) -> Backups:
    """List backups, the oldest first, also of sandboxes that are gone."""
    sandbox = query.sandbox
    if sandbox is not None:
        call.principal.check_sandbox(check_id(sandbox))
    found = await call.host.backups.list(sandbox_id=sandbox, prefix=query.prefix)
    return Backups([one for one in found if one.sandbox_id.startswith(call.principal.prefix)])


@endpoint("GET", "/backups/{backup}", errors=(*_KEPT, NotFound, Forbidden))
async def get(call: Call) -> Backup:
    """What is known of a backup."""
    return await _backup(call)


@endpoint("DELETE", "/backups/{backup}", errors=(*_KEPT, Conflict, Forbidden), slow=True)
async def delete(call: Call) -> None:
    """Remove a backup. One that is not there is fine."""
    try:
        backup = await _backup(call)
    except NotFound:
        return
    await call.host.backups.delete(backup.id)


async def _backup(call: Call) -> Backup:
    backup = await call.host.backups.get(call.part("backup"))
    # Whoever may use a sandbox may use its backups, and nobody else.
    if not backup.sandbox_id.startswith(call.principal.prefix):
        raise Forbidden(
            f"this key is not for the sandbox that backup {backup.id} is of.",
            hint="Use the key of who made it.",
            key=call.principal.id,
            reason="scope",
        )
    return backup


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


ENDPOINTS = [create, restore, progress, list_all, get, delete]
