"""Snapshots of a sandbox: make, list, compare, restore and remove them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.server_resources import Snapshots, snapshot_segment
from smokebox.foundation.ids import new_global_id
from smokebox.types import Snapshot, SnapshotDiff
from smokebox.wire import requests, responses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.client.sandbox_connection import SandboxConnection


class SandboxSnapshots:
    """Methods of `Sandbox` about snapshots."""

    _connection: SandboxConnection

    async def snapshot(
        self,
        name: str | None = None,
        *,
        description: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep_last: int | None = None,
        keep_for: float | str | None = None,
    ) -> Snapshot:
        """Make a snapshot of all files, awake or asleep. It outlives the sandbox.

        Programs keep running, but for some milliseconds in which they are frozen. Their memory,
        /dev/shm and mounted buckets are not included.

        Args:
            name: Name to find it by, unique among the snapshots of the key.
            description: Text for people.
            labels: Names and values, added to those of the sandbox.
            keep_last: Then remove earlier snapshots of the sandbox without a name, but the last
                ones, so many with this one.
            keep_for: Remove only those that are older: seconds, or text such as "2h", "7d".

        Raises:
            Conflict: The name is taken.
            LimitReached: The sandbox and its snapshots use as much disk as it may.
        """
        body = requests.CreateSnapshot(
            name=name,
            description=description,
            labels=dict(labels or {}),
            keep_last=keep_last,
            keep_for=keep_for,
        )
        return await self._connection.request(
            Snapshot, "POST", "/snapshots", body=body, timeout=None, idempotency_key=new_global_id()
        )

    async def prune_snapshots(
        self, *, keep_last: int | None = None, keep_for: float | str | None = None
    ) -> list[Snapshot]:
        """Delete snapshots of this sandbox without a name that are not kept, and return them.

        Args:
            keep_last: Keep so many, the latest.
            keep_for: Keep those that are not older: seconds, or text such as "2h", "7d".
        """
        query = {"keep_last": keep_last, "keep_for": keep_for}
        response = await self._connection.request(
            responses.Snapshots, "DELETE", "/snapshots", query=query, timeout=None
        )
        return response.snapshots

    async def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of this sandbox, oldest first."""
        return await Snapshots(self._connection.transport).list(sandbox=self._connection.id)

    async def restore(self, snapshot: Snapshot | str, *, save_as: str | None = None) -> Snapshot:
        """Replace all files by those of a snapshot, or none if that fails.

        Processes end, and the next call starts the sandbox again.

        Args:
            snapshot: A snapshot of this or another sandbox of the same image, or its id or name.
            save_as: Make a snapshot of the present state with this name first.

        Raises:
            NotFound: There is no such snapshot.
            Conflict: It is of another image.
        """
        body = requests.RestoreSnapshot(save_as=save_as)
        target = f"/snapshots/{snapshot_segment(snapshot)}/restore"
        return await self._connection.request(Snapshot, "POST", target, body=body, timeout=None)

    async def diff(
        self,
        before: Snapshot | str,
        after: Snapshot | str | None = None,
        *,
        texts: bool = False,
    ) -> SnapshotDiff:
        """Return the paths that differ between two snapshots, or one and the present state.

        Args:
            before: The earlier snapshot, or its id or name.
            after: The later one; by default the present state of this sandbox.
            texts: Return the changed lines of text files too.
        """
        if after is not None:
            snapshots = Snapshots(self._connection.transport)
            return await snapshots.diff(before, after, texts=texts)
        query = {"texts": "true"} if texts else {}
        path = f"/snapshots/{snapshot_segment(before)}/diff"
        return await self._connection.request(SnapshotDiff, "GET", path, query=query, timeout=None)

    async def delete_snapshot(self, snapshot: Snapshot | str) -> None:
        """Delete a snapshot. Safe to repeat; sandboxes created from it keep their files."""
        await Snapshots(self._connection.transport).delete(snapshot)


async def take_checkpoint(
    sandbox: SandboxSnapshots, description: str, *, keep_last: int
) -> Snapshot:
    """Make a snapshot of the origin "turn", or return the last one if nothing changed since."""
    body = requests.CreateSnapshot(
        description=description, keep_last=keep_last, origin="turn", if_changed=True
    )
    return await sandbox._connection.request(
        Snapshot, "POST", "/snapshots", body=body, timeout=None, idempotency_key=new_global_id()
    )
