"""Buckets mounted as directories."""

from __future__ import annotations

import msgspec

from smokebox.errors import InvalidOption, InvalidPath, NotFound, SmokeboxError
from smokebox.sandbox.access import Access
from smokebox.server.compat.bridge.errors import BridgeError, operation_failed
from smokebox.server.compat.bridge.names import sandbox_of
from smokebox.server.compat.bridge.route import Ok, bridge_route
from smokebox.server.endpoint import ApiCall
from smokebox.server.routes.mounts import request_for

_MOUNT, _UNMOUNT = "mount_error", "unmount_error"


class BucketCredentials(msgspec.Struct, rename="camel"):
    """Keys of a bucket."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None


class MountOptions(msgspec.Struct, rename="camel"):
    """Options of a mount. Credentials never get into the sandbox. `s3fsOptions` are refused."""

    endpoint: str | None = None
    region: str | None = None
    read_only: bool = False
    prefix: str | None = None
    credentials: BucketCredentials | None = None
    s3fs_options: list[str] | None = None


class MountBody(msgspec.Struct, rename="camel"):
    """A bucket to mount: `bucket`, or `binding` for one that the server offers."""

    mount_path: str
    bucket: str | None = None
    binding: str | None = None
    options: MountOptions = msgspec.field(default_factory=MountOptions)


class UnmountBody(msgspec.Struct, rename="camel"):
    """A mount to remove."""

    mount_path: str


@bridge_route("POST", "/v1/sandbox/{id}/mount", "mountBucket", errors=(400, 502))
async def mount(call: ApiCall, body: MountBody) -> Ok:
    """Mount a bucket as a directory. Safe to repeat."""
    call.sandbox = sandbox_of(call.request)
    await mount_bucket(call, body)
    return Ok()


async def mount_bucket(call: ApiCall, body: MountBody) -> None:
    """Mount a bucket in the sandbox of `call`."""
    options = body.options
    if options.s3fs_options:
        raise BridgeError(400, "s3fsOptions is not supported: mounts do not use s3fs", _MOUNT)
    name = body.binding or body.bucket
    if not name or (body.binding and body.bucket):
        raise BridgeError(400, "a mount needs either bucket or binding", _MOUNT)
    keys = options.credentials
    access = Access()
    if not body.binding:
        access = Access(
            # The server knows the endpoint of a bucket that it offers.
            endpoint=options.endpoint if keys or name not in call.state.settings.buckets else None,
            region=options.region,
            access_key=keys.access_key_id if keys else None,
            secret_key=keys.secret_access_key if keys else None,
            session_token=keys.session_token if keys else None,
        )
    try:
        request = request_for(
            call,
            name,
            body.mount_path,
            prefix=options.prefix or "",
            read_only=options.read_only,
            access=access,
        )
    except (InvalidOption, InvalidPath) as error:
        raise BridgeError(400, str(error), _MOUNT) from error
    try:
        await call.sandbox.mounts.mount(request)
    except SmokeboxError as error:
        raise operation_failed("the mount", error, _MOUNT) from error


@bridge_route("POST", "/v1/sandbox/{id}/unmount", "unmountBucket", errors=(400, 502))
async def unmount(call: ApiCall, body: UnmountBody) -> Ok:
    """Unmount a bucket after flushing pending writes."""
    sandbox = sandbox_of(call.request)
    try:
        await sandbox.mounts.unmount(body.mount_path)
    except (InvalidOption, InvalidPath, NotFound) as error:
        raise BridgeError(400, str(error), _UNMOUNT) from error
    except SmokeboxError as error:
        raise operation_failed("the unmount", error, _UNMOUNT) from error
    return Ok()
