"""Resources of a server besides sandboxes: all backups, and API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.sandbox_connection import path_segment
from smokebox.types import Backup, Snapshot, SnapshotDiff
from smokebox.wire import requests, responses
from smokebox.wire.requests import CreateKey
from smokebox.wire.responses import KeyDetails, KeyInfo, NewKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.client.transport import Transport


class Backups:
    """Backups of one server, including those of destroyed sandboxes, as `Client.backups`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, sandbox: str | None = None, prefix: str = "") -> list[Backup]:
        """Return backups, oldest first.

        Args:
            sandbox: Only those of the sandbox of this id.
            prefix: Only those of sandboxes whose ids start with this.
        """
        query = {"sandbox": sandbox, "prefix": prefix}
        return (
            await self._transport.request(responses.Backups, "GET", "/backups", query=query)
        ).backups

    async def get(self, id: str) -> Backup:
        """Return a backup by its id.

        Raises:
            NotFound: There is no such backup, or it has expired.
        """
        return await self._transport.request(Backup, "GET", f"/backups/{backup_segment(id)}")

    async def delete(self, backup: Backup | str) -> None:
        """Delete a backup. Safe to repeat."""
        path = f"/backups/{backup_segment(backup)}"
        await self._transport.request(type(None), "DELETE", path, timeout=None)


class Snapshots:
    """Snapshots of one server, including those of destroyed sandboxes, as `Client.snapshots`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, sandbox: str | None = None, prefix: str = "") -> list[Snapshot]:
        """Return snapshots, oldest first.

        Args:
            sandbox: Only those of the sandbox of this id.
            prefix: Only those of sandboxes whose ids start with this.
        """
        query = {"sandbox": sandbox, "prefix": prefix}
        return (
            await self._transport.request(responses.Snapshots, "GET", "/snapshots", query=query)
        ).snapshots

    async def get(self, name: str) -> Snapshot:
        """Return a snapshot by its id or name.

        Raises:
            NotFound: There is no such snapshot.
        """
        return await self._transport.request(
            Snapshot, "GET", f"/snapshots/{snapshot_segment(name)}"
        )

    async def diff(
        self, before: Snapshot | str, after: Snapshot | str, *, texts: bool = False
    ) -> SnapshotDiff:
        """Return the paths that differ between two snapshots of one image.

        Args:
            before: The earlier snapshot, or its id or name.
            after: The later one.
            texts: Return the changed lines of text files too.
        """
        query = {"to": after.id if isinstance(after, Snapshot) else after, "texts": _flag(texts)}
        path = f"/snapshots/{snapshot_segment(before)}/diff"
        return await self._transport.request(SnapshotDiff, "GET", path, query=query, timeout=None)

    async def export(self, snapshot: Snapshot | str) -> Snapshot:
        """Put a snapshot into the bucket of the server's backups. Safe to repeat.

        Raises:
            NotFound: There is no such snapshot.
            Unsupported: The server has no bucket.
        """
        path = f"/snapshots/{snapshot_segment(snapshot)}/export"
        return await self._transport.request(Snapshot, "POST", path, timeout=None)

    async def load(self, id: str, *, name: str | None = None) -> Snapshot:
        """Take a snapshot from the bucket, which this or another server exported.

        Args:
            id: Id of the snapshot.
            name: Its name on this server, by default the one that it had.

        Raises:
            NotFound: The bucket has no such snapshot, or the server lacks its image.
            Conflict: The server has it already, or its name is taken.
        """
        body = requests.ImportSnapshot(id=id, name=name)
        path = "/snapshots/import"
        return await self._transport.request(Snapshot, "POST", path, body=body, timeout=None)

    async def delete(self, snapshot: Snapshot | str) -> None:
        """Delete a snapshot. Safe to repeat; sandboxes created from it keep their files."""
        path = f"/snapshots/{snapshot_segment(snapshot)}"
        await self._transport.request(type(None), "DELETE", path, timeout=None)


class Keys:
    """API keys of one server, as `Client.keys`. For administrators."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[KeyInfo]:
        """Return all keys without their secrets, oldest first."""
        return (await self._transport.request(responses.Keys, "GET", "/keys")).keys

    async def create(
        self,
        name: str,
        *,
        prefix: str = "",
        admin: bool = False,
        expires_in: float | None = None,
        profile: str | None = None,
        scopes: Sequence[str] | None = None,
        overlap: bool = False,
    ) -> NewKey:
        """Create a key. Its secret, in `key`, is returned only here.

        Args:
            name: Name for people.
            prefix: Restrict it to sandboxes whose ids start with this and a hyphen.
            admin: Allow it to manage keys and the server as well.
            expires_in: Seconds until it expires, by default never.
            profile: Name of its ceilings in the server's configuration, by default "default".
            scopes: What it may do, such as "sandboxes:read"; by default everything.
            overlap: Allow a prefix that overlaps with that of another key.

        Raises:
            Conflict: The prefix overlaps with that of another key.
        """
        body = CreateKey(
            name=name,
            prefix=prefix,
            admin=admin,
            expires_in=expires_in,
            profile=profile,
            scopes=None if scopes is None else list(scopes),
            overlap=overlap,
        )
        return await self._transport.request(NewKey, "POST", "/keys", body=body)

    async def get(self, id: str) -> KeyDetails:
        """Return a key with its ceilings, and what it uses of its quotas.

        Raises:
            NotFound: There is no such key.
        """
        return await self._transport.request(KeyDetails, "GET", f"/keys/{path_segment('key', id)}")

    async def revoke(self, id: str) -> None:
        """Revoke a key by its id.

        Raises:
            NotFound: There is no such key.
        """
        await self._transport.request(type(None), "DELETE", f"/keys/{path_segment('key', id)}")


def backup_segment(backup: Backup | str) -> str:
    """Return the id of a backup as a segment of a path."""
    return path_segment("backup", backup.id if isinstance(backup, Backup) else backup)


def snapshot_segment(snapshot: Snapshot | str) -> str:
    """Return the id or name of a snapshot as a segment of a path."""
    return path_segment("snapshot", snapshot.id if isinstance(snapshot, Snapshot) else snapshot)


def _flag(value: bool) -> str | None:
    return "true" if value else None
