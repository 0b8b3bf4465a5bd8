"""Backups: of one sandbox by its handle, and of all that a server has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.handle import Handle, part, repeat_key
from smokebox.options import check_timeout
from smokebox.types import Backup, BackupProgress, RestoredBackup
from smokebox.wire import answers, requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.client.transport import Transport


class BackupsOf(Handle):
    """`create_backup`, `restore_backup` and what goes with them."""

    async def create_backup(
        self,
        path: str = "/workspace",
        *,
        name: str | None = None,
        ttl: float | None = None,
        excludes: Sequence[str] = (),
        gitignore: bool = False,
        compression: int | None = None,
        freeze: bool = False,
        timeout: float | None = None,
    ) -> Backup:
        """Keep what is in a directory at this moment. It outlives the sandbox.

        It is kept for `ttl` seconds, by default until it is deleted. What `excludes` matches is
        left out, and with `gitignore` what .gitignore files say. Programs run on meanwhile:
        each file is as it was at some moment. With `freeze` they stand still, and all files are
        of one moment. `compression` is a level of zstd, 1 to 19. Cancelling breaks it off, and
        nothing is left of it.
        """
        body = requests.CreateBackup(
            path=self.resolve_path(path),
            name=name,
            ttl=ttl,
            excludes=_words(excludes),
            gitignore=gitignore,
            compression=compression,
            freeze=freeze,
            timeout=check_timeout(timeout),
        )
        return await self._ask(
            Backup, "POST", "/backups", body=body, timeout=None, repeat_key=repeat_key()
        )

    async def restore_backup(
        self, backup: Backup | str, *, path: str | None = None, timeout: float | None = None
    ) -> RestoredBackup:
        """Have a directory be what a backup has of it; where that fails it is as it was.

        By default it is the directory that was packed, of this sandbox or of another. What it
        has besides is gone then.
        """
        body = requests.RestoreBackup(
            path=None if path is None else self.resolve_path(path), timeout=check_timeout(timeout)
        )
        where = f"/backups/{_part(backup)}/restore"
        return await self._ask(RestoredBackup, "POST", where, body=body, timeout=None)

    async def list_backups(self) -> list[Backup]:
        """The backups that were made of this sandbox, the oldest first."""
        return await Backups(self._transport).list(sandbox=self.id)

    async def get_backup(self, id: str) -> Backup:
        """A backup by its id, of whichever sandbox. Raises `NotFound`."""
        return await Backups(self._transport).get(id)

    async def delete_backup(self, backup: Backup | str) -> None:
        """Remove a backup. One that is not there is fine."""
        await Backups(self._transport).delete(backup)

    async def backup_progress(self) -> list[BackupProgress]:
        """How far the backups are that are being made or restored at this moment."""
        found = await self._ask(answers.BackupsUnderWay, "GET", "/backups/progress")
        return found.progress


class Backups:
    """The backups of one server, as `Client.backups`: also of sandboxes that are gone."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, sandbox: str | None = None, prefix: str = "") -> list[Backup]:
        """All backups, those of one sandbox, or of those whose ids begin so; oldest first."""
        query = {"sandbox": sandbox, "prefix": prefix}
        return (await self._transport.ask(answers.Backups, "GET", "/backups", query=query)).backups

    async def get(self, id: str) -> Backup:
        """A backup by its id. Raises `NotFound`, also for one that has expired."""
        return await self._transport.ask(Backup, "GET", f"/backups/{_part(id)}")

    async def delete(self, backup: Backup | str) -> None:
        """Remove a backup. One that is not there is fine."""
        where = f"/backups/{_part(backup)}"
        await self._transport.ask(type(None), "DELETE", where, timeout=None)


def _part(backup: Backup | str) -> str:
    return part("backup", backup.id if isinstance(backup, Backup) else backup)


def _words(excludes: Sequence[str]) -> list[str]:
    # A string is a sequence too: the server says what is wrong with it.
    return excludes if isinstance(excludes, str) else list(excludes)  # type: ignore[return-value]
