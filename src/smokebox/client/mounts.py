"""Buckets that are directories of a sandbox."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from smokebox.client.handle import Handle
from smokebox.errors import InvalidOption
from smokebox.sandbox.access import Access, with_environment
from smokebox.types import Mount
from smokebox.wire import answers
from smokebox.wire.requests import MountBucket

if TYPE_CHECKING:
    from smokebox.sandbox.bucket import BucketBinding


class Mounts(Handle):
    """`mount_bucket` and its end."""

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
        """Have a bucket that speaks S3, or a folder of it, be a directory; wakes the sandbox.

        `bucket` is a name, `s3://name/folder`, or a bucket of the project such as `env.DATA`.
        Credentials that are not given come from the environment of this process (AWS_*, then
        R2_*); without any, `bucket` is the name of one that the server offers. They stay
        outside of the sandbox. What the directory holds is hidden meanwhile. It is mounted
        again whenever the sandbox wakes. Safe to repeat; raises `Conflict` where another is.
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
            _check_alone(bucket, access)
            access, read_only = bucket.access, read_only or bucket.read_only
            prefix = f"{bucket.prefix}/{prefix}".strip("/")
            bucket = bucket.target
        access = with_environment(access)
        body = MountBucket(
            bucket=bucket,
            path=self.resolve_path(path),
            prefix=prefix,
            read_only=read_only,
            **asdict(access),
        )
        return await self._ask(Mount, "POST", "/mounts", body=body, timeout=None)

    async def unmount_bucket(self, path: str, *, force: bool = False) -> None:
        """Have a bucket be a directory no more; all that was written is in it then.

        Raises `Conflict` while somebody uses it. With `force` it is gone for who comes, and
        ends with the last who uses it.
        """
        query: dict[str, Any] = {"path": self.resolve_path(path)}
        if force:
            query["force"] = "true"
        await self._ask(type(None), "DELETE", "/mounts", query=query, timeout=None)

    async def list_mounts(self) -> list[Mount]:
        """What is mounted, or will be when the sandbox wakes, in the order of mounting."""
        return (await self._ask(answers.Mounts, "GET", "/mounts")).mounts


def _check_alone(binding: BucketBinding, access: Access) -> None:
    if access != Access():
        raise InvalidOption(
            f"the bucket {binding.name} of the project says itself how it is opened.",
            hint="Leave that out, or pass the name of the bucket as text.",
            option="bucket",
            value=binding.name,
        )
