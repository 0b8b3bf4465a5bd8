"""One restore from its beginning to its end, which it comes to whatever happens on the way.

The record says how far it is before each step that could not be taken back without knowing
that. Until the archive is unpacked nothing of the sandbox is changed; from then on it goes on
to its end, also when nobody waits any more, or in the next engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.backups import archive, swap
from smokebox.engine.files.credentials import acting_as
from smokebox.engine.files.rooted import Rooted
from smokebox.engine.record.rows import RestoreRow
from smokebox.engine.run import DESTROYED
from smokebox.engine.workers import Job
from smokebox.errors import Conflict, DeadlineExceeded, NotFound, SmokeboxError, Unsupported
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Concatenate, Literal, ParamSpec

    from smokebox.engine.backups.archive import Progress
    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.files.executor import RootExecutor
    from smokebox.engine.run import Run
    from smokebox.types import Extracted

    P = ParamSpec("P")

_log = logging.getLogger("smokebox.engine")


def row_of(run: Run, path: str) -> RestoreRow:
    """What the record has of a restore of that directory."""
    staging = swap.staging_for(path)
    return RestoreRow(sandbox_id=run.id, staging=staging, path=path, state="unpacking")


class RestoreJob:
    """A restore of a directory in a run of a sandbox."""

    def __init__(self, run: Run, backups: Backups, row: RestoreRow) -> None:
        self._run = run
        self._backups = backups
        self._row = row
        # Ours, until all is done: the run may end meanwhile, and its number be another file.
        self._files = Rooted(os.dup(run.jail.root), run.jail.owner)

    async def restore(self, desk: RootExecutor, source: str, tally: Progress) -> Extracted:
        """Have the directory be what is in the archive, or as it was."""
        path, staging = self._row.path, self._row.staging
        try:
            file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                await self._note("unpacking")
                was_there = await desk.run(swap.prepare, path, staging)
                self._refuse_mounts()
                done = await desk.run(_unpack, path, staging, file, tally)
            finally:
                os.close(file)
            await run_to_completion(self._swap(was_there=was_there))
            return done
        finally:
            await run_to_completion(self._clean())

    async def resume(self) -> None:
        """Go on with what another engine has begun."""
        try:
            if self._row.state == "clearing":
                await self._do(swap.clear)
                await self._note("placing")
            if self._row.state == "placing":
                await self._do(swap.fill)
                await self._note("done")
        except (SmokeboxError, OSError) as error:
            _log.warning("restoring %s in %s stopped: %s", self._row.path, self._run.id, error)
        finally:
            await run_to_completion(self._clean())

    async def _swap(self, *, was_there: bool) -> None:
        async with still(self._run, lenient=True):
            try:
                await self._note("clearing")
                await self._do(swap.clear)
                await self._note("placing")
                await self._do(swap.fill)
            except (SmokeboxError, OSError):
                await self._undo(was_there=was_there)
                raise
            await self._note("done")

    async def _undo(self, *, was_there: bool) -> None:
        if self._row.state == "placing":
            await self._do(swap.empty)
            await self._note("clearing")
        await self._do(swap.refill, was_there=was_there)
        await self._note("done")

    async def _clean(self) -> None:
        """Remove what was unpacked or replaced; what is half done is left for the next run."""
        try:
            if self._row.state in ("unpacking", "done"):
                await self._do(lambda files, path, staging: swap.discard(files, staging))
                await self._backups.forget(self._row)
                return
        except (SmokeboxError, OSError) as error:
            _log.warning("%s is left in %s: %s", self._row.staging, self._run.id, error)
        finally:
            os.close(self._files.root)
        self._backups.unfinished.setdefault(self._run.id, []).append(self._row)

    async def _note(self, state: Literal["unpacking", "clearing", "placing", "done"]) -> None:
        row = replace(self._row, state=state)
        try:
            await self._backups.note(row)
        except NotFound as error:
            raise self._run.gone(DESTROYED) from error
        self._row = row

    async def _do(
        self, step: Callable[Concatenate[Rooted, str, str, P], None], *args: P.args, **kw: P.kwargs
    ) -> None:
        def work() -> None:
            with acting_as(self._files.owner):
                step(self._files, self._row.path, self._row.staging, *args, **kw)

        await self._backups.workers.run(Job(), work)

    def _refuse_mounts(self) -> None:
        path = self._row.path
        if mounted := swap.mounts_below(self._run.jail.state.pid, path):
            raise Conflict(
                f"something is mounted at {mounted[0]}, in what is to be replaced.",
                hint="Unmount it first, or restore into another path=.",
                kind="mount",
                name=mounted[0],
            )


def _unpack(files: Rooted, path: str, staging: str, source: int, tally: Progress) -> Extracted:
    with swap.opened(files, staging, swap.NEW) as top:
        return archive.unpack(files, top, path, source, tally)


@contextlib.asynccontextmanager
async def still(run: Run, *, lenient: bool = False) -> AsyncIterator[None]:
    """The processes of a sandbox stand still; `lenient` takes it that some cannot."""
    try:
        # Not left in the middle: it would stop them once nobody lets them go on.
        await run_to_completion(run.jail.freeze())
    except (Unsupported, DeadlineExceeded):
        if not lenient:
            raise
        yield
        return
    except BaseException:
        await run_to_completion(_thaw(run))
        raise
    try:
        yield
    finally:
        await run_to_completion(_thaw(run))


async def _thaw(run: Run) -> None:
    # What is dead stands still anyway.
    with contextlib.suppress(SmokeboxError):
        await run.jail.thaw()
