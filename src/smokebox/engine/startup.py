"""Start of a run from the record, and adoption of one that still runs.

A run is recorded before its jail can outlive this process. A failed start leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.egress.layers import EgressLayers
from smokebox.engine.egress.trust import VARIABLES
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.images.image import DEFAULT_USER
from smokebox.engine.jail.jail import OUTPUT
from smokebox.engine.jail.namespace_setup import IO
from smokebox.engine.options import DEFAULT_IMAGE
from smokebox.engine.record.rows import DEFAULT_CWD, SandboxRow, delete, put, update
from smokebox.engine.run import Run
from smokebox.errors import SandboxGone, SmokeboxError, from_os_error
from smokebox.runtime.spill import SpillFolder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.engine.context import EngineContext
    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.jail.spec import JailState, Owner
    from smokebox.engine.options import CheckedOptions
    from smokebox.engine.pool import PooledJail
    from smokebox.engine.record.rows import SnapshotRow


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """A started run and its row in the record."""

    row: SandboxRow
    run: Run


async def start(
    context: EngineContext, id: str, row: SandboxRow | None, options: CheckedOptions
) -> StartedRun:
    """Wake the sandbox of a row, or create one with options."""
    # Until it is in the record, nothing else keeps the image from being removed.
    with context.catalog.lease():
        origin = await _origin(context, row, options)
        # Until the record says that this sandbox is stacked on them.
        with context.snapshots.pinned(origin.layers if origin else row.layers if row else ()):
            return await _start(context, id, row, options, origin)


async def _start(
    context: EngineContext,
    id: str,
    row: SandboxRow | None,
    options: CheckedOptions,
    origin: SnapshotRow | None,
) -> StartedRun:
    known = row is not None
    ready: PooledJail | None = None
    if row is not None:
        row = await context.snapshots.settle(row)
        row = replace(row, layers=context.snapshots.canonical(row.layers))
        jailer = context.jailer(row.tier)
        base = await context.images.get(row.image, scope=id, digest=row.digest)
    else:
        if origin is not None:
            jailer = context.jailer(options.tier or origin.tier)
            base = await context.images.get(origin.image, scope=id, digest=origin.digest)
        else:
            jailer = context.jailer(options.tier or context.tier)
            name, digest = options.image or DEFAULT_IMAGE, options.digest or ""
            base = await context.images.get(name, scope=id, digest=digest)
            ready = context.pool.take(jailer, base)
        key = ready.spec.key if ready is not None else context.key()
        user = base.user if jailer.has_users else DEFAULT_USER
        row = options.row(id, key=key, image=base, tier=jailer.tier, user=user, origin=origin)
    image = await context.snapshots.stack(base, row.layers)
    sessions = origin.sessions if origin is not None else ()
    jail = ready.jail if ready is not None else None
    awake = replace(
        row,
        status="active",
        generation=row.generation + 1,
        last_active_at=time.time(),
        stop_reason=None,
        stop_cause=None,
    )

    async def record_state(state: JailState) -> None:
        rows = [put(replace(session, sandbox_id=id)) for session in sessions]
        await context.record.write(put(replace(awake, jail=state)), *rows)

    try:
        if jail is not None:
            await _claim(jail, context.cgroup_of(row.settings.group), record_state)
        else:
            disk = await context.snapshots.disk_limit(row.id, row.limits.disk)
            await asyncio.to_thread(context.storage.prepare, row.key, disk)
            await context.snapshots.prepare(row, image)
            spec = context.spec(row.key, image, row.limits, group=row.settings.group)
            jail = await jailer.make(spec, on_fork=record_state)
        started = await _enter(context, replace(awake, jail=jail.state), jail, image)
    except BaseException as error:
        await _undo(context, row, jail, known=known)
        if isinstance(error, OSError) and not isinstance(error, SmokeboxError):
            raise from_os_error(error, error.filename or context.home.path) from error
        raise
    if row.settings.cwd != DEFAULT_CWD:
        # A cwd requested meanwhile takes precedence.
        context.cwds.setdefault(id, row.settings.cwd)
    if not known:
        await context.catalog.touch(base.digest)
    return started


async def _claim(
    jail: Jail, group: str, record_state: Callable[[JailState], Awaitable[None]]
) -> None:
    """Record a jail of the pool, and move it into the group of its sandbox.

    Until it is entered, it ends with this process.
    """
    steps = [record_state(replace(jail.state, group=group)), *([jail.join(group)] if group else [])]
    # Both end before a failure is cleaned up after.
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _origin(
    context: EngineContext, row: SandboxRow | None, options: CheckedOptions
) -> SnapshotRow | None:
    """Return the snapshot that a sandbox is created from, if any."""
    if row is not None or options.snapshot is None:
        return None
    found = await context.snapshots.row(options.snapshot)
    if not context.snapshots.complete(found.layers):
        raise context.snapshots.missing(options.snapshot)
    return found


async def image_of(context: EngineContext, row: SandboxRow) -> Image:
    """Return the image of a sandbox, with the layers of snapshots that it is stacked on."""
    base = await context.images.get(row.image, scope=row.id, digest=row.digest)
    return await context.snapshots.stack(base, row.layers)


async def find(context: EngineContext, row: SandboxRow) -> Jail | None:
    """Return the running jail of a row, or None."""
    if row.jail is None:
        return None
    # Without the layers: the store may have dropped them.
    spec = context.spec(row.key, None, row.limits)
    return await context.jailer(row.tier).adopt(spec, row.jail)


async def as_run(context: EngineContext, row: SandboxRow, jail: Jail, image: Image) -> Run:
    """Build the run of a jail."""

    async def root() -> tuple[int, Owner]:
        if not jail.alive:
            raise SandboxGone(f"sandbox {row.id} stopped.", reason="jail ended")
        return jail.root, jail.owner

    context.limit_group(row.settings.group)
    context.guard.set_stored(row.id, await context.snapshots.stored(row.id))
    executor = RootExecutor(root, context.workers)
    directory = context.storage.directory(row.key)
    return Run(
        id=row.id,
        jail=jail,
        generation=row.generation,
        directory=directory,
        image=image,
        env=environment(image, row),
        cwd=row.settings.cwd,
        default_user=row.settings.user,
        shell=await executor.run(_prepare, row.settings.cwd),
        limits=row.limits,
        spills=SpillFolder(parent=f"{directory}/{OUTPUT}", shown_parent=f"{IO}/output"),
        read=lambda path: executor.run(RootedFiles.read, path),
        check_disk=lambda: context.guard.check_disk(row.key, row.id),
    )


def environment(image: Image, row: SandboxRow) -> dict[str, str]:
    """Return the environment variables of all programs of a sandbox."""
    closed = row.egress == EgressLayers() or row.egress.egress().closed
    return {**image.env, **({} if closed else VARIABLES), **row.env}


async def _enter(context: EngineContext, row: SandboxRow, jail: Jail, image: Image) -> StartedRun:
    timeout = row.settings.orphan_timeout
    entering = asyncio.create_task(jail.enter(row.id, row.limits, orphan_timeout=timeout))
    try:
        run = await as_run(context, row, jail, image)
    finally:
        await entering
    return StartedRun(row=row, run=run)


async def _undo(context: EngineContext, row: SandboxRow, jail: Jail | None, *, known: bool) -> None:
    """Clean up after a failed start. An existing sandbox keeps its files."""
    if jail is not None:
        await jail.kill()
    if not known:
        await context.remove(row.key)
    idle = replace(row, status="idle", jail=None)
    # If this write fails, the record says "active", and the next wake finds the jail dead.
    with contextlib.suppress(SmokeboxError):
        await context.record.write(update(idle) if known else delete(SandboxRow, row.id))


def _prepare(rooted: RootedFiles, cwd: str) -> str:
    """Create the working directory of commands, and return their shell."""
    rooted.make_directory(cwd, recursive=True)
    return "/bin/bash" if rooted.exists("/bin/bash") else "/bin/sh"
