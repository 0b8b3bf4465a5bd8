"""Storage of a sandbox beyond its files: git checkouts, bucket mounts and backups."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from smokebox.client.server_resources import Backups, backup_segment
from smokebox.errors import InvalidOption
from smokebox.foundation.ids import new_global_id
from smokebox.options import check_timeout
from smokebox.sandbox.access import Access, with_environment
from smokebox.types import Backup, BackupProgress, GitCheckout, Mount, RestoredBackup
from smokebox.wire import requests, responses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.client.sandbox_connection import SandboxConnection
    from smokebox.sandbox.bucket import BucketBinding


class SandboxStorage:
    """Methods of `Sandbox` about repositories, buckets and backups."""

    _connection: SandboxConnection

    async def git_checkout(
        self,
        url: str,
        target: str | None = None,
        *,
        branch: str | None = None,
        depth: int | None = None,
        timeout: float | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> GitCheckout:
        """Clone a repository. Cancelling removes what was cloned so far.

        The server makes the requests, so credentials never enter the sandbox.

        Args:
            url: An https or http URL.
            target: Directory to clone into, by default one named like the repository.
            branch: Branch or tag to check out.
            depth: Number of commits of history to fetch.
            timeout: Seconds after which the clone is cancelled.
            username: User name for the git server.
            password: Password or token for the git server.
        """
        body = requests.CheckOutRepository(
            url=url,
            target=target,
            branch=branch,
            depth=depth,
            timeout=check_timeout(timeout),
            username=username,
            password=password,
        )
        return await self._connection.request(
            GitCheckout, "POST", "/git/checkout", body=body, timeout=None
        )

    async def mount_bucket(
        self,
        bucket: str | BucketBinding,
        path: str,
        *,
        prefix: str = "",
        read_only: bool = False,
        endpoint: str | None = None,
        region: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        allow_http: bool | None = None,
        anonymous: bool = False,
    ) -> Mount:
        """Mount an S3 bucket, or a folder of it, as a directory; wakes the sandbox.

        It is mounted again whenever the sandbox wakes. Files that the directory held before
        are hidden meanwhile. Credentials stay outside of the sandbox. Safe to repeat.

        Args:
            bucket: A name, `s3://name/folder`, or a bucket of the project such as `env.DATA`.
            path: Directory to mount it at.
            prefix: Folder of the bucket to mount.
            read_only: Refuse writes.
            endpoint: URL of the object store.
            region: Region of the bucket.
            access_key: Access key. Credentials that are not given come from the environment
                of this process (AWS_*, then R2_*); without any, `bucket` is the name of a
                bucket that the server offers.
            secret_key: Secret key.
            session_token: Token of temporary credentials.
            allow_http: Accept an endpoint without TLS.
            anonymous: Send requests without credentials.

        Raises:
            Conflict: Another bucket is mounted there.
        """
        access = Access(
            endpoint=endpoint,
            region=region,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            allow_http=allow_http,
            anonymous=anonymous,
        )
        if not isinstance(bucket, str):
            _check_no_access(bucket, access)
            access, read_only = bucket.access, read_only or bucket.read_only
            prefix = f"{bucket.prefix}/{prefix}".strip("/")
            bucket = bucket.target
        access = with_environment(access)
        body = requests.MountBucket(
            bucket=bucket,
            path=self._connection.resolve_path(path),
            prefix=prefix,
            read_only=read_only,
            **asdict(access),
        )
        return await self._connection.request(Mount, "POST", "/mounts", body=body, timeout=None)

    async def unmount_bucket(self, path: str, *, force: bool = False) -> None:
        """Unmount a bucket after flushing pending writes.

        Args:
            path: Directory that it is mounted at.
            force: Detach it even while it is in use; programs that use it keep it until
                they close it.

        Raises:
            Conflict: A program uses it, and `force` is not set.
        """
        query: dict[str, Any] = {"path": self._connection.resolve_path(path)}
        if force:
            query["force"] = "true"
        await self._connection.request(type(None), "DELETE", "/mounts", query=query, timeout=None)

    async def list_mounts(self) -> list[Mount]:
        """Return the mounts, oldest first, including those restored when the sandbox wakes."""
        return (await self._connection.request(responses.Mounts, "GET", "/mounts")).mounts

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
        """Back up a directory. The backup outlives the sandbox; cancelling leaves none.

        Args:
            path: Directory to back up.
            name: Name for people.
            ttl: Seconds to keep it, by default until it is deleted.
            excludes: Patterns of paths to leave out.
            gitignore: Leave out what .gitignore files exclude.
            compression: Level of zstd, 1 to 19.
            freeze: Pause all programs meanwhile, so that all files are of one moment.
                Otherwise each file is consistent by itself.
            timeout: Seconds after which it is cancelled.
        """
        body = requests.CreateBackup(
            path=self._connection.resolve_path(path),
            name=name,
            ttl=ttl,
            excludes=_words(excludes),
            gitignore=gitignore,
            compression=compression,
            freeze=freeze,
            timeout=check_timeout(timeout),
        )
        return await self._connection.request(
            Backup, "POST", "/backups", body=body, timeout=None, idempotency_key=new_global_id()
        )

    async def restore_backup(
        self, backup: Backup | str, *, path: str | None = None, timeout: float | None = None
    ) -> RestoredBackup:
        """Replace a directory by a backup of this or another sandbox, all or nothing.

        Args:
            backup: A backup, or its id.
            path: Directory to replace, by default the one that was backed up. Files that are
                not in the backup are removed.
            timeout: Seconds after which it is cancelled.

        Raises:
            NotFound: There is no such backup, or it has expired.
        """
        body = requests.RestoreBackup(
            path=None if path is None else self._connection.resolve_path(path),
            timeout=check_timeout(timeout),
        )
        target = f"/backups/{backup_segment(backup)}/restore"
        return await self._connection.request(
            RestoredBackup, "POST", target, body=body, timeout=None
        )

    async def list_backups(self) -> list[Backup]:
        """Return the backups of this sandbox, oldest first."""
        return await Backups(self._connection.transport).list(sandbox=self._connection.id)

    async def get_backup(self, id: str) -> Backup:
        """Return a backup of any sandbox by its id.

        Raises:
            NotFound: There is no such backup, or it has expired.
        """
        return await Backups(self._connection.transport).get(id)

    async def delete_backup(self, backup: Backup | str) -> None:
        """Delete a backup. Safe to repeat."""
        await Backups(self._connection.transport).delete(backup)

    async def backup_progress(self) -> list[BackupProgress]:
        """Return the progress of the backups that are being made or restored."""
        response = await self._connection.request(
            responses.BackupsUnderWay, "GET", "/backups/progress"
        )
        return response.progress


def _check_no_access(binding: BucketBinding, access: Access) -> None:
    if access != Access():
        raise InvalidOption(
            f"the bucket {binding.name} of the project has its own access options.",
            hint="Leave the options out, or pass the name of the bucket as text.",
            option="bucket",
            value=binding.name,
        )


def _words(excludes: Sequence[str]) -> list[str]:
    # A string is a sequence too: the server reports the mistake.
    return excludes if isinstance(excludes, str) else list(excludes)  # type: ignore[return-value]
