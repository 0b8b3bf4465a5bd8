"""Buckets mounted as directories of a sandbox."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from smokebox.engine.mounts.request import MountRequest, parse_request
from smokebox.errors import (
    AccessDenied,
    BucketNotFound,
    Conflict,
    InvalidOption,
    InvalidPath,
    LimitReached,
    MissingDependency,
    NotFound,
    PathError,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.sandbox.access import Access
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.tenancy.ceilings import check_hosts
from smokebox.types import Mount
from smokebox.wire.requests import MountBucket, Unmount
from smokebox.wire.responses import Mounts

# Where a bucket is that names no endpoint.
_AWS = "https://s3.amazonaws.com"
_WAKE_ERRORS = (Conflict, LimitReached, SandboxGone)
_ERRORS = (
    InvalidOption,
    InvalidPath,
    PathError,
    AccessDenied,
    BucketNotFound,
    ServiceUnavailable,
    MissingDependency,
    Unsupported,
    *_WAKE_ERRORS,
)


@endpoint("GET", "/sandboxes/{id}/mounts")
async def list_all(call: ApiCall) -> Mounts:
    """List the mounts of a sandbox, in the order of mounting.

    A sleeping sandbox mounts them again when it wakes.
    """
    return Mounts(await call.sandbox.mounts.list())


@endpoint("POST", "/sandboxes/{id}/mounts", errors=_ERRORS, slow=True)
async def mount(call: ApiCall, body: MountBucket) -> Mount:
    """Mount a bucket at a directory, which is created if needed. Wakes the sandbox.

    The server reads and writes the objects, so credentials never get into the sandbox. It only
    connects to public addresses of other hosts, and to networks that the operator granted. Without
    credentials, `bucket` is the name of a bucket that the server offers. Safe to repeat.
    """
    access = Access(
        endpoint=body.endpoint,
        region=body.region,
        access_key=body.access_key,
        secret_key=body.secret_key,
        session_token=body.session_token,
        allow_http=body.allow_http,
        anonymous=body.anonymous,
    )
    request = request_for(
        call, body.bucket, body.path, prefix=body.prefix, read_only=body.read_only, access=access
    )
    return await call.sandbox.mounts.mount(request)


@endpoint(
    "DELETE",
    "/sandboxes/{id}/mounts",
    errors=(NotFound, InvalidPath, PathError, Conflict, ServiceUnavailable),
    slow=True,
)
async def unmount(call: ApiCall, query: Unmount) -> None:
    """Unmount a bucket after flushing pending writes. Does not wake the sandbox.

    A mount in use is a conflict, unless `force` is set.
    """
    await call.sandbox.mounts.unmount(query.path, force=query.force)


ENDPOINTS = [list_all, mount, unmount]


def request_for(
    call: ApiCall, bucket: str, path: str, *, prefix: str, read_only: bool, access: Access
) -> MountRequest:
    """Resolve a mount of a client. Only the operator may allow private addresses."""
    settings = call.state.settings
    cwd = call.sandbox.cwd
    offered = settings.buckets.get(bucket) if access == Access() else None
    if offered is None:
        check_hosts(call.principal, [_host_of(access.endpoint or _AWS)])
        return parse_request(
            bucket,
            path,
            cwd=cwd,
            prefix=prefix,
            read_only=read_only,
            access=access,
            private=call.private_access,
        )
    inside = "/".join(part for part in (offered.prefix, prefix.strip("/")) if part)
    found = parse_request(
        offered.bucket,
        path,
        cwd=cwd,
        prefix=inside,
        read_only=read_only or offered.read_only,
        access=offered.access,
        private=True,
    )
    return replace(found, name=bucket)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or url
    except ValueError:
        # Refused where it is parsed.
        return url
