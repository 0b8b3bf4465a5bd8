"""How a run of a sandbox comes to be: made from its record, or found where it still runs.

A run is written down before its jail can outlive this process. Of a start that fails
nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.egress.layers import Layers
from smokebox.engine.egress.trust import VARIABLES
from smokebox.engine.files.rooted import Rooted
from smokebox.engine.files.steps import Desk
from smokebox.engine.jail.cell import IO
from smokebox.engine.options import DEFAULT_IMAGE
from smokebox.engine.record.rows import DEFAULT_CWD, SandboxRow, delete, put, update
from smokebox.engine.run import Run
from smokebox.errors import SandboxGone, SmokeboxError
from smokebox.sandbox.filesystems.filesystem import from_os_error
from smokebox.sandbox.spill import SpillFolder

if TYPE_CHECKING:
    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.api import Jail, JailState, Owner
    from smokebox.engine.options import Options
    from smokebox.engine.workshop import Workshop


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A run, and the row that says so."""

    row: SandboxRow
    run: Run


async def start(shop: Workshop, id: str, row: SandboxRow | None, asked: Options) -> Started:
    """Wake the sandbox of a row, or make one as it was asked for."""
    image = await shop.images.get((row.image if row else asked.image) or DEFAULT_IMAGE)
    jailer = shop.jailer((row.tier if row else asked.tier) or shop.tier)
    ready = shop.pool.take(jailer, image) if row is None else None
    known = row is not None
    if row is None:
        key = ready.spec.key if ready is not None else shop.key()
        row = asked.row(id, key=key, image=image, tier=jailer.tier)
    jail = ready.jail if ready is not None else None
    awake = replace(
        row,
        status="active",
        generation=row.generation + 1,
        last_active_at=time.time(),
        stop_reason=None,
    )

    async def write_down(state: JailState) -> None:
        await shop.record.write(put(replace(awake, jail=state)))

    try:
        if jail is not None:
            await write_down(jail.state)
        else:
            spec = shop.spec(row.key, image, row.limits)
            jail = await jailer.make(spec, known=write_down)
        started = await _enter(shop, replace(awake, jail=jail.state), jail, image)
    except BaseException as error:
        await _undo(shop, row, jail, known=known)
        if isinstance(error, OSError) and not isinstance(error, SmokeboxError):
            raise from_os_error(error, error.filename or shop.home.path) from error
        raise
    if row.settings.cwd != DEFAULT_CWD:
        # Another may have been asked for meanwhile.
        shop.cwds.setdefault(id, row.settings.cwd)
    return started


async def find(shop: Workshop, row: SandboxRow) -> Jail | None:
    """The jail that a row says runs, if it does."""
    if row.jail is None:
        return None
    # Without its layers, which may be gone from the store by now.
    spec = shop.spec(row.key, None, row.limits)
    return await shop.jailer(row.tier).adopt(spec, row.jail)


async def as_run(shop: Workshop, row: SandboxRow, jail: Jail, image: Image) -> Run:
    """The run that a jail is."""

    async def root() -> tuple[int, Owner]:
        if not jail.alive:
            raise SandboxGone(f"sandbox {row.id} stopped.", reason="jail ended")
        return jail.root, jail.owner

    desk = Desk(root, shop.workers)
    directory = shop.home.box(row.key)
    return Run(
        id=row.id,
        jail=jail,
        generation=row.generation,
        directory=directory,
        image=image,
        env=environment(image, row),
        cwd=row.settings.cwd,
        default_user=row.settings.user,
        shell=await desk.run(_prepare, row.settings.cwd),
        limits=row.limits,
        spills=SpillFolder(parent=f"{directory}/run/io", seen_at=IO),
        read=lambda path: desk.run(Rooted.read, path),
    )


def environment(image: Image, row: SandboxRow) -> dict[str, str]:
    """What every program of a sandbox finds in its environment."""
    closed = row.egress == Layers() or row.egress.egress().closed
    return {**image.env, **({} if closed else VARIABLES), **row.env}


async def _enter(shop: Workshop, row: SandboxRow, jail: Jail, image: Image) -> Started:
    entering = asyncio.create_task(jail.enter(row.id, row.limits))
    try:
        run = await as_run(shop, row, jail, image)
    finally:
        await entering
    return Started(row=row, run=run)


async def _undo(shop: Workshop, row: SandboxRow, jail: Jail | None, *, known: bool) -> None:
    """Leave nothing of a start that failed; a sandbox that was there stays as it was."""
    if jail is not None:
        await jail.kill()
    if not known:
        await shop.remove(row.key)
    idle = replace(row, status="idle", jail=None)
    # A record that cannot be written says that it runs: whoever looks finds it dead.
    with contextlib.suppress(SmokeboxError):
        await shop.record.write(update(idle) if known else delete(SandboxRow, row.id))


def _prepare(rooted: Rooted, cwd: str) -> str:
    """Make sure of the directory that commands start in; the shell that they start with."""
    rooted.make_directory(cwd, recursive=True)
    return "/bin/bash" if rooted.exists("/bin/bash") else "/bin/sh"
