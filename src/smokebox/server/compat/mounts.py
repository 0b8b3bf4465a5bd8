"""Buckets that are directories of a sandbox, as this protocol asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from smokebox.errors import InvalidOption, InvalidPath, NotFound, SmokeboxError
from smokebox.sandbox.access import Access
from smokebox.server.compat.ids import sandbox_of
from smokebox.server.compat.messages import decoded, ok
from smokebox.server.compat.refusal import Refusal, failed
from smokebox.server.mounting import request_for

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.server.call import Call

_MOUNT, _UNMOUNT = "mount_error", "unmount_error"


class Credentials(msgspec.Struct, rename="camel"):
    """What opens a bucket."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None


class Options(msgspec.Struct, rename="camel"):
    """How a bucket is mounted. Credentials never get into a sandbox, whoever asks for that."""

    endpoint: str | None = None
    region: str | None = None
    read_only: bool = False
    prefix: str | None = None
    credentials: Credentials | None = None
    s3fs_options: list[str] | None = None


class MountBody(msgspec.Struct, rename="camel"):
    """A bucket that is to be mounted; one that is offered by the server is a `binding`."""

    mount_path: str
    bucket: str | None = None
    binding: str | None = None
    options: Options = msgspec.field(default_factory=Options)


class UnmountBody(msgspec.Struct, rename="camel"):
    """A mount that is to end."""

    mount_path: str


async def mount(call: Call) -> Response:
    """Mount a bucket. Safe to repeat."""
    body = decoded(MountBody, await call.body())
    call.sandbox = sandbox_of(call.request)
    await perform(call, body)
    return ok()


async def perform(call: Call, body: MountBody) -> None:
    """Mount a bucket in the sandbox of a call."""
    options = body.options
    if options.s3fs_options:
        raise Refusal(400, "s3fsOptions are for s3fs, which is not what mounts here", _MOUNT)
    name = body.binding or body.bucket
    if not name or (body.binding and body.bucket):
        raise Refusal(400, "a mount has one of bucket and binding", _MOUNT)
    keys = options.credentials
    access = Access()
    if not body.binding:
        access = Access(
            # Of a bucket that the server offers, it is the server that knows where it is.
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
        raise Refusal(400, str(error), _MOUNT) from error
    try:
        await call.sandbox.mounts.mount(request)
    except SmokeboxError as error:
        raise failed("the mount", error, _MOUNT) from error


async def unmount(call: Call) -> Response:
    """Unmount a bucket."""
    body = decoded(UnmountBody, await call.body())
    sandbox = sandbox_of(call.request)
    try:
        await sandbox.mounts.unmount(body.mount_path)
    except (InvalidOption, InvalidPath, NotFound) as error:
        raise Refusal(400, str(error), _UNMOUNT) from error
    except SmokeboxError as error:
        raise failed("the unmount", error, _UNMOUNT) from error
    return ok()
