"""Replacement of a directory of a sandbox by the content of a backup: all of it, or none.

The archive is unpacked beside the directory, into `new` in a staging directory. Then the content
of the directory moves to `old` beside `new`, and that of `new` takes its place. The directory
itself stays, so that shells and watches in it see the new content.

The record holds the state of each restore. While it is "unpacking", nothing in the sandbox has
changed. After that the restore runs to its end even if its caller is cancelled, or in the next
engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import re
import stat as stat_bits
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.backups import archive
from smokebox.engine.files.credentials import acting_as
from smokebox.engine.files.descriptors import LIST, closing, open_child, path_errors
from smokebox.engine.files.operations import relocate
from smokebox.engine.files.replacement import copy_owner, temporary_name
from smokebox.engine.files.rooted_files import RootedFiles, refuse_mount
from smokebox.engine.files.trees import lstat, names_in, remove_tree
from smokebox.engine.record.rows import RestoreRow
from smokebox.engine.run import DESTROYED
from smokebox.engine.workers import Job
from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    NotFound,
    PathError,
    PathNotDirectory,
    SmokeboxError,
    Unsupported,
)
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import Concatenate, Literal, ParamSpec

    from smokebox.engine.backups.archive import BackupOperation
    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.files.executor import RootExecutor
    from smokebox.engine.run import Run
    from smokebox.types import Extracted

    P = ParamSpec("P")

_NEW, _OLD = "new", "old"
_OCTAL = re.compile(r"\\([0-7]{3})")

_log = logging.getLogger("smokebox.engine")


def new_restore(run: Run, path: str) -> RestoreRow:
    """Return the row of a restore into a directory, with a staging directory beside it."""
    staging = posixpath.join(posixpath.dirname(path), temporary_name(fresh=True))
    return RestoreRow(sandbox_id=run.id, staging=staging, path=path, state="unpacking")


class RestoreJob:
    """One restore into a directory, in a run of a sandbox."""

    def __init__(self, run: Run, backups: Backups, row: RestoreRow) -> None:
        self._run = run
        self._backups = backups
        self._row = row
        # A duplicate: the run may end before the restore does.
        self._files = RootedFiles(os.dup(run.jail.root), run.jail.owner)

    async def restore(
        self, executor: RootExecutor, source: str, operation: BackupOperation
    ) -> Extracted:
        """Replace the directory by the content of an archive file, or leave it unchanged."""
        path, staging = self._row.path, self._row.staging
        try:
            file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                await self._save("unpacking")
                existed = await executor.run(_prepare, path, staging)
                self._refuse_mounts()
                result = await executor.run(_unpack, path, staging, file, operation)
            finally:
                os.close(file)
            await run_to_completion(self._swap(existed=existed))
            return result
        finally:
            await run_to_completion(self._clean_up())

    async def resume(self) -> None:
        """Finish a restore that another engine started."""
        try:
            if self._row.state == "clearing":
                await self._do(_move_out)
                await self._save("placing")
            if self._row.state == "placing":
                await self._do(_move_in)
                await self._save("done")
        except (SmokeboxError, OSError) as error:
            _log.warning("restoring %s in %s failed: %s", self._row.path, self._run.id, error)
        finally:
            await run_to_completion(self._clean_up())

    async def _swap(self, *, existed: bool) -> None:
        async with frozen(self._run, lenient=True):
            try:
                await self._save("clearing")
                await self._do(_move_out)
                await self._save("placing")
                await self._do(_move_in)
            except (SmokeboxError, OSError):
                await self._undo(existed=existed)
                raise
            await self._save("done")

    async def _undo(self, *, existed: bool) -> None:
        if self._row.state == "placing":
            await self._do(_undo_move_in)
            await self._save("clearing")
        await self._do(_undo_move_out, existed=existed)
        await self._save("done")

    async def _clean_up(self) -> None:
        """Remove the staging directory; an interrupted swap is left to the next run."""
        try:
            if self._row.state in ("unpacking", "done"):
                await self._do(_remove_staging)
                await self._backups.delete_restore(self._row)
                return
        except (SmokeboxError, OSError) as error:
            _log.warning("%s is left in %s: %s", self._row.staging, self._run.id, error)
        finally:
            os.close(self._files.root)
        self._backups.unfinished.setdefault(self._run.id, []).append(self._row)

    async def _save(self, state: Literal["unpacking", "clearing", "placing", "done"]) -> None:
        row = replace(self._row, state=state)
        try:
            await self._backups.save_restore(row)
        except NotFound as error:
            raise self._run.gone(DESTROYED) from error
        self._row = row

    async def _do(
        self,
        step: Callable[Concatenate[RootedFiles, str, str, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        def work() -> None:
            with acting_as(self._files.owner):
                step(self._files, self._row.path, self._row.staging, *args, **kwargs)

        await self._backups.workers.run(Job(), work)

    def _refuse_mounts(self) -> None:
        """Raise if something is mounted below the directory: it would be moved and emptied too."""
        if mounted := _mounts_below(self._run.jail.state.pid, self._row.path):
            raise Conflict(
                f"something is mounted at {mounted[0]}, inside the directory to replace.",
                hint="Unmount it first, or restore into another path=.",
                kind="mount",
                name=mounted[0],
            )


@contextlib.asynccontextmanager
async def frozen(run: Run, *, lenient: bool = False) -> AsyncIterator[None]:
    """Freeze the processes of a sandbox; `lenient` continues if some cannot be frozen."""
    try:
        # To completion: a freeze interrupted halfway would not be thawed.
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
    # A jail that died cannot be thawed, and need not.
    with contextlib.suppress(SmokeboxError):
        await run.jail.thaw()


# The functions below block, and run in a thread that acts as root of the sandbox. Paths are
# absolute, and what is found at them is not trusted.


def _prepare(files: RootedFiles, path: str, staging: str) -> bool:
    """Create the staging directory for a directory; return whether that exists.

    Raises for a directory that cannot be replaced.
    """
    if path == "/":
        raise PathError(
            path,
            "the whole sandbox cannot be replaced.",
            hint="Restore into a directory, such as path='/workspace'.",
        )
    with path_errors(path):
        files.make_directory(posixpath.dirname(path), recursive=True)
        with files.locate(path) as place:
            found = lstat(place.parent, place.name)
            if found is not None:
                if not stat_bits.S_ISDIR(found.st_mode):
                    raise PathNotDirectory(path, hint="Pass a directory, not a symlink to one.")
                refuse_mount(place, found, path)
            name = posixpath.basename(staging)
            os.mkdir(name, 0o700, dir_fd=place.parent)
            with closing(open_child(place.parent, name, LIST)) as fd:
                for inner in (_NEW, _OLD):
                    os.mkdir(inner, 0o700, dir_fd=fd)
            return found is not None


def _unpack(
    files: RootedFiles, path: str, staging: str, source: int, operation: BackupOperation
) -> Extracted:
    with _open_staging(files, staging, _NEW) as top:
        return archive.unpack(files, top, path, source, operation)


def _move_out(files: RootedFiles, path: str, staging: str) -> None:
    """Move the content of the directory, which is created if missing, to `old`."""
    with path_errors(path), files.locate(path) as place, contextlib.suppress(FileExistsError):
        os.mkdir(place.name, 0o700, dir_fd=place.parent)
    with _open_directory(files, path) as fd, _open_staging(files, staging, _OLD) as old:
        _move_all(fd, old, path)


def _move_in(files: RootedFiles, path: str, staging: str) -> None:
    """Move the content of `new` to the directory, with the owner, mode and times of `new`."""
    with _open_directory(files, path) as fd, _open_staging(files, staging, _NEW) as new:
        found = os.fstat(new)
        _move_all(new, fd, path)
        copy_owner(found, fd)
        os.fchmod(fd, stat_bits.S_IMODE(found.st_mode))
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def _undo_move_in(files: RootedFiles, path: str, staging: str) -> None:
    with _open_directory(files, path) as fd, _open_staging(files, staging, _NEW) as new:
        _move_all(fd, new, path)


def _undo_move_out(files: RootedFiles, path: str, staging: str, *, existed: bool) -> None:
    with _open_directory(files, path) as fd, _open_staging(files, staging, _OLD) as old:
        _move_all(old, fd, path)
    if not existed:
        with path_errors(path), files.locate(path) as place:
            os.rmdir(place.name, dir_fd=place.parent)


def _remove_staging(files: RootedFiles, _: str, staging: str) -> None:
    with (
        path_errors(staging),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        files.locate(staging) as place,
    ):
        remove_tree(place.parent, place.name, staging, one_filesystem=True)


@contextlib.contextmanager
def _open_directory(files: RootedFiles, path: str) -> Iterator[int]:
    with (
        path_errors(path),
        files.locate(path) as place,
        closing(open_child(place.parent, place.name, LIST)) as fd,
    ):
        yield fd


@contextlib.contextmanager
def _open_staging(files: RootedFiles, staging: str, name: str) -> Iterator[int]:
    """Open `new` or `old` in the staging directory."""
    with _open_directory(files, staging) as fd, closing(open_child(fd, name, LIST)) as inner:
        yield inner


def _move_all(source: int, target: int, path: str) -> None:
    for name in names_in(source):
        with contextlib.suppress(FileNotFoundError):
            relocate(source, name, target, path)


def _mounts_below(pid: int, path: str) -> list[str]:
    """Return the mount points below a directory in the root of a process."""
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    # The kernel writes a space as \040.
    plain = [_OCTAL.sub(lambda found: chr(int(found[1], 8)), point) for point in points]
    return [point for point in plain if point.startswith(f"{path}/")]
