"""Buckets that are directories of a sandbox."""

from __future__ import annotations

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
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.mounting import request_for
from smokebox.types import Mount
from smokebox.wire.answers import Mounts
from smokebox.wire.requests import MountBucket, Unmount

_WAKING = (Conflict, LimitReached, SandboxGone)
_ERRORS = (
    InvalidOption,
    InvalidPath,
    PathError,
    AccessDenied,
    BucketNotFound,
    ServiceUnavailable,
    MissingDependency,
    Unsupported,
    *_WAKING,
)


@endpoint("GET", "/sandboxes/{id}/mounts")
async def list_all(call: Call) -> Mounts:
    """List what is mounted, or will be when the sandbox wakes, in the order of mounting."""
    return Mounts(await call.sandbox.mounts.list())


@endpoint("POST", "/sandboxes/{id}/mounts", errors=_ERRORS, slow=True)
async def mount(call: Call, body: MountBucket) -> Mount:
    """Mount a bucket on a directory, which is made if need be; wakes the sandbox.

    The server asks for the objects, so credentials never get into the sandbox, and asks
    public addresses only, unless it is one user's own or was started so. Without credentials,
    `bucket` is one that the server has by that name. Safe to repeat.
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
async def unmount(call: Call, query: Unmount) -> None:
    """Unmount a bucket; all that was written is in it then. Wakes nothing.

    While somebody uses it, that is a conflict, unless `force`.
    """
    await call.sandbox.mounts.unmount(query.path, force=query.force)


ENDPOINTS = [list_all, mount, unmount]
