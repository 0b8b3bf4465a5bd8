"""Backups of directories, which outlive their sandboxes."""

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
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.idempotency import Creation
from smokebox.types import Backup, RestoredBackup
from smokebox.wire.requests import CreateBackup, ListBackups, RestoreBackup
from smokebox.wire.responses import Backups, BackupsUnderWay

_STORE_ERRORS = (ServiceUnavailable, BucketNotFound, PathError, MissingDependency)
_ERRORS = (
    *_STORE_ERRORS,
    InvalidOption,
    InvalidPath,
    NotFound,
    Conflict,
    LimitReached,
    DeadlineExceeded,
    SandboxGone,
    Unsupported,
)


@endpoint("POST", "/sandboxes/{id}/backups", errors=_ERRORS, status=201, slow=True)
async def create(call: ApiCall, body: CreateBackup) -> Backup:
    """Back up a directory of a sandbox.

    The backup outlives the sandbox, until it is deleted or its `ttl` is over. Closing the
    connection cancels it. With the header Idempotency-Key the request may be repeated, and
    creates one backup.
    """

    async def create_with_id(id: str) -> Backup:
        async with call.state.quotas.keep(call.principal, "backups", id, call.sandbox.id):
            return await call.sandbox.backups.create(
                body.path,
                id=id,
                name=body.name,
                ttl=body.ttl,
                excludes=body.excludes,
                gitignore=body.gitignore,
                freeze=body.freeze,
                **_without_none(compression=body.compression, timeout=body.timeout),
            )

    return await call.state.idempotency.once(
        call,
        body,
        Creation(
            kind="backup", id=random_backup_id(), find=call.host.backups.get, create=create_with_id
        ),
    )


@endpoint(
    "POST",
    "/sandboxes/{id}/backups/{backup}/restore",
    errors=(*_ERRORS, BadSnapshot, Forbidden),
    slow=True,
)
async def restore(call: ApiCall, body: RestoreBackup) -> RestoredBackup:
    """Replace a directory of a sandbox with the content of a backup.

    The backup may be of any sandbox that the key may use. Files that are not in the backup are
    removed. If the restore fails, the directory is unchanged.
    """
    backup = await _backup(call)
    return await call.sandbox.backups.restore(
        backup, path=body.path, **_without_none(timeout=body.timeout)
    )


@endpoint("GET", "/sandboxes/{id}/backups/progress")
async def progress(call: ApiCall) -> BackupsUnderWay:
    """Return the progress of the backups that are being made or restored in a sandbox."""
    return BackupsUnderWay(call.sandbox.backups.progress())


@endpoint("GET", "/backups", errors=(InvalidOption,))
async def list_all(call: ApiCall, query: ListBackups) -> Backups:
    """List backups, oldest first, including those of destroyed sandboxes."""
    sandbox = query.sandbox
    if sandbox is not None:
        call.principal.check_sandbox(check_id(sandbox))
    found = await call.host.backups.list(sandbox_id=sandbox, prefix=query.prefix)
    return Backups(
        [backup for backup in found if backup.sandbox_id.startswith(call.principal.prefix)]
    )


@endpoint("GET", "/backups/{backup}", errors=(*_STORE_ERRORS, NotFound, Forbidden))
async def get(call: ApiCall) -> Backup:
    """Return the metadata of a backup."""
    return await _backup(call)


@endpoint("DELETE", "/backups/{backup}", errors=(*_STORE_ERRORS, Conflict, Forbidden), slow=True)
async def delete(call: ApiCall) -> None:
    """Delete a backup. Succeeds if there is none."""
    try:
        backup = await _backup(call)
    except NotFound:
        return
    await call.host.backups.delete(backup.id)


async def _backup(call: ApiCall) -> Backup:
    backup = await call.host.backups.get(call.path_param("backup"))
    # Access to a backup follows access to its sandbox.
    if not backup.sandbox_id.startswith(call.principal.prefix):
        raise Forbidden(
            f"this key may not use the sandbox of backup {backup.id}.",
            hint="Use the key that created the backup.",
            key=call.principal.id,
            reason="scope",
        )
    return backup


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


ENDPOINTS = [create, restore, progress, list_all, get, delete]
