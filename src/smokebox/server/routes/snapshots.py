"""Snapshots of whole sandboxes, and forks. Snapshots outlive their sandboxes."""

from __future__ import annotations

import contextlib

from smokebox.engine.names import check_id, check_labels
from smokebox.engine.snapshots.forks import fork_ids, no_memory
from smokebox.engine.snapshots.retention import no_retention, parse_retention
from smokebox.engine.snapshots.snapshots import random_snapshot_id
from smokebox.errors import (
    BadSnapshot,
    BucketNotFound,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidOption,
    LimitReached,
    MissingDependency,
    NotFound,
    PathError,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.foundation.ids import new_id
from smokebox.server.endpoint import ApiCall, endpoint, sandbox_not_found
from smokebox.server.idempotency import Creation
from smokebox.server.tenancy.ceilings import check_egress
from smokebox.types import SandboxInfo, Snapshot, SnapshotDiff
from smokebox.wire.requests import (
    CreateSnapshot,
    DiffToPresent,
    DiffToSnapshot,
    Fork,
    ImportSnapshot,
    ListSnapshots,
    PruneSnapshots,
    RestoreSnapshot,
)
from smokebox.wire.responses import Sandboxes, Snapshots

_ERRORS = (
    InvalidOption,
    NotFound,
    Conflict,
    Forbidden,
    LimitReached,
    PathError,
    DeadlineExceeded,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
_BUCKET_ERRORS = (*_ERRORS, BadSnapshot, BucketNotFound, MissingDependency)


@endpoint("POST", "/sandboxes/{id}/snapshots", errors=_ERRORS, status=201, slow=True)
async def create(call: ApiCall, body: CreateSnapshot) -> Snapshot:
    """Make a snapshot of all files of a sandbox, awake or asleep.

    Programs are frozen for some milliseconds. The snapshot outlives the sandbox. With the header
    Idempotency-Key the request may be repeated, and makes one snapshot.
    """

    retention = parse_retention(body.keep_last, body.keep_for)

    async def create_with_id(id: str) -> Snapshot:
        freed: set[str] = set()
        if retention is not None:
            upcoming = int(body.name is None)
            freed = await call.sandbox.snapshots.outdated(
                retention, origin=body.origin, upcoming=upcoming
            )
        async with call.state.quotas.keep(
            call.principal, "snapshots", id, call.sandbox.id, freed=freed
        ):
            return await call.sandbox.snapshots.create(
                body.name,
                description=body.description,
                labels=check_labels(body.labels),
                id=id,
                scope=call.principal.prefix,
                retention=retention,
                origin=body.origin,
                if_changed=body.if_changed,
            )

    return await call.state.idempotency.once(
        call,
        body,
        Creation(
            kind="snapshot",
            id=random_snapshot_id(),
            find=call.host.snapshots.get,
            create=create_with_id,
        ),
    )


@endpoint("DELETE", "/sandboxes/{id}/snapshots", errors=(InvalidOption,), slow=True)
async def prune(call: ApiCall, query: PruneSnapshots) -> Snapshots:
    """Delete the snapshots of a sandbox without a name that are not kept, and return them."""
    retention = parse_retention(query.keep_last, query.keep_for)
    if retention is None:
        raise no_retention()
    return Snapshots(await call.sandbox.snapshots.prune(retention))


@endpoint("POST", "/sandboxes/{id}/snapshots/{snapshot}/restore", errors=_ERRORS, slow=True)
async def restore(call: ApiCall, body: RestoreSnapshot) -> Snapshot:
    """Replace all files of a sandbox by those of a snapshot. Its run ends.

    The snapshot may be of any sandbox that the key may use, and is of the same image. If the
    restore fails, the files are unchanged.
    """
    snapshot = await find_snapshot(call, call.path_param("snapshot"))
    making: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
    if body.save_as is not None:
        id = random_snapshot_id()
        making = call.state.quotas.keep(call.principal, "snapshots", id, call.sandbox.id)
    async with making:
        return await call.sandbox.snapshots.restore(
            snapshot.id, save_as=body.save_as, scope=call.principal.prefix
        )


@endpoint(
    "GET", "/sandboxes/{id}/snapshots/{snapshot}/diff", errors=_ERRORS, reads=False, slow=True
)
async def diff_to_present(call: ApiCall, query: DiffToPresent) -> SnapshotDiff:
    """Compare a snapshot with the present state of a sandbox of the same image."""
    snapshot = await find_snapshot(call, call.path_param("snapshot"))
    return await call.sandbox.snapshots.diff(snapshot.id, texts=query.texts)


@endpoint("POST", "/sandboxes/{id}/fork", errors=_ERRORS, status=201, slow=True)
async def fork(call: ApiCall, body: Fork) -> Sandboxes:
    """Create sandboxes that go on from the present state of one: all of them, or none.

    They have its image, egress policy, environment, limits, labels, settings and sessions, and
    start with their first request. With the header Idempotency-Key the request may be repeated.
    """
    if body.memory:
        raise no_memory(call.sandbox.id)
    layers = call.sandbox.lifecycle.layers
    if layers is not None:
        # The policy may be one that only the operator may set.
        check_egress(call.principal, layers.egress())

    def ids(token: str) -> list[str]:
        return fork_ids(call.sandbox.id, body.count, body.ids, token=token)

    async def create_with_id(token: str) -> Sandboxes:
        chosen = ids(token)
        for id in chosen:
            call.principal.check_sandbox(id)
        forks = await call.host.fork(call.sandbox.id, ids=chosen)
        return Sandboxes([info for one in forks if (info := await one.info()) is not None])

    async def find(token: str) -> Sandboxes:
        return Sandboxes([await _info(call, id) for id in ids(token)])

    return await call.state.idempotency.once(
        call, body, Creation(kind="fork", id=new_id(), find=find, create=create_with_id)
    )


@endpoint("GET", "/snapshots", errors=(InvalidOption,))
async def list_all(call: ApiCall, query: ListSnapshots) -> Snapshots:
    """List snapshots, oldest first, including those of destroyed sandboxes."""
    sandbox = query.sandbox
    if sandbox is not None:
        call.principal.check_sandbox(check_id(sandbox))
    found = await call.host.snapshots.list(sandbox_id=sandbox, prefix=query.prefix)
    return Snapshots([one for one in found if one.sandbox_id.startswith(call.principal.prefix)])


@endpoint("GET", "/snapshots/{snapshot}", errors=(NotFound, Forbidden))
async def get(call: ApiCall) -> Snapshot:
    """Return a snapshot by its id or name."""
    return await find_snapshot(call, call.path_param("snapshot"))


@endpoint("GET", "/snapshots/{snapshot}/diff", errors=_ERRORS, slow=True)
async def diff(call: ApiCall, query: DiffToSnapshot) -> SnapshotDiff:
    """Compare two snapshots of one image: the paths that were added, changed and removed."""
    before = await find_snapshot(call, call.path_param("snapshot"))
    if query.to is None:
        raise InvalidOption(
            "the query has no field 'to'.",
            hint="Add the id or the name of a later snapshot.",
            option="to",
            value=None,
        )
    after = await find_snapshot(call, query.to)
    rows = [await call.host.snapshots.row(one.id) for one in (before, after)]
    return await call.host.snapshots.diff(rows[0], rows[1], texts=query.texts)


@endpoint("POST", "/snapshots/{snapshot}/export", errors=_BUCKET_ERRORS, slow=True)
async def export(call: ApiCall) -> Snapshot:
    """Put a snapshot into the bucket of the server's backups. Safe to repeat."""
    snapshot = await find_snapshot(call, call.path_param("snapshot"))
    row = await call.host.snapshots.row(snapshot.id)
    return await call.host.snapshot_archives.export(row)


@endpoint("POST", "/snapshots/import", errors=_BUCKET_ERRORS, status=201, slow=True)
async def import_(call: ApiCall, body: ImportSnapshot) -> Snapshot:
    """Take a snapshot from the bucket, which this or another server exported."""
    found = await call.host.snapshot_archives.find(body.id)
    call.principal.check_sandbox(found.row.sandbox_id)
    size = sum(layer.row.size for layer in found.layers)
    await call.state.quotas.check_import(call.principal, found.row.sandbox_id, size)
    async with call.state.quotas.keep(
        call.principal, "snapshots", found.row.id, found.row.sandbox_id
    ):
        return await call.host.snapshot_archives.load(
            found, name=body.name, scope=call.principal.prefix
        )


@endpoint("DELETE", "/snapshots/{snapshot}", errors=(Forbidden,), slow=True)
async def delete(call: ApiCall) -> None:
    """Delete a snapshot. Sandboxes that were created from it keep their files."""
    try:
        snapshot = await find_snapshot(call, call.path_param("snapshot"))
    except NotFound:
        return
    await call.host.snapshots.delete(snapshot.id)


async def find_snapshot(call: ApiCall, name: str) -> Snapshot:
    """Return a snapshot that the key may use, by its id or its name among those of the key."""
    found = await call.host.snapshots.get(name, scope=call.principal.prefix)
    # Access to a snapshot follows access to its sandbox.
    if not found.sandbox_id.startswith(call.principal.prefix):
        raise Forbidden(
            f"this key may not use the sandbox of snapshot {found.id}.",
            hint="Use the key that made the snapshot.",
            key=call.principal.id,
            reason="scope",
        )
    return found


async def _info(call: ApiCall, id: str) -> SandboxInfo:
    info = await call.host.sandbox(id).info()
    if info is None:
        raise sandbox_not_found(id)
    return info


ENDPOINTS = [
    create,
    prune,
    export,
    import_,
    restore,
    fork,
    list_all,
    get,
    diff,
    diff_to_present,
    delete,
]
