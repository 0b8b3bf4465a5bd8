"""Requests to mount a bucket, checked once."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.engine.mounts.fuse_protocol import DEVICE
from smokebox.errors import InvalidOption, InvalidPath, MissingDependency, Unsupported
from smokebox.foundation.paths import resolve
from smokebox.sandbox.access import BUCKET_NAME, Access, check_prefix

if TYPE_CHECKING:
    from smokebox.egress.address_guard import PrivateAccess

# Directories with mounts of the engine in or below them, and directories that programs need.
_ENGINE_DIRECTORIES = ("/dev", "/proc", "/run/smokebox", "/sys")
_SYSTEM_DIRECTORIES = ("/", "/bin", "/etc", "/lib", "/lib64", "/run", "/sbin", "/usr")


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRequest:
    """A bucket, or a folder of it, for one directory of a sandbox.

    `private` permits endpoints at private addresses, or in some networks. `name` is the name of a
    bucket that the operator configured, if it is one.
    """

    path: str
    bucket: str
    prefix: str
    read_only: bool
    access: Access = field(repr=False)
    private: PrivateAccess = False
    name: str | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MountRequest:
        """Return the request that `dataclasses.asdict` turned into `fields`."""
        return cls(**{**fields, "access": Access(**fields["access"])})


def parse_request(
    bucket: str,
    path: str,
    *,
    cwd: str,
    access: Access,
    prefix: str = "",
    read_only: bool = False,
    private: PrivateAccess = False,
) -> MountRequest:
    """Check everything that needs no access to the sandbox or the store."""
    name, folder = _parse_bucket(bucket)
    full_prefix = check_prefix(f"{folder}/{prefix.strip('/')}")
    if access.access_key is None and not access.anonymous:
        raise InvalidOption(
            f"there are no credentials for the bucket {name!r}.",
            hint="Pass access_key= and secret_key=, set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY where you call from, or pass anonymous=True for a public one.",
            option="access_key",
        )
    return MountRequest(
        path=parse_path(path, cwd),
        bucket=name,
        prefix=full_prefix,
        read_only=read_only,
        access=access,
        private=private,
    )


def parse_path(path: str, cwd: str) -> str:
    """Return the absolute form of a path that is allowed as a mount point."""
    absolute = resolve(path, cwd)
    if absolute in _SYSTEM_DIRECTORIES or any(
        absolute == directory or absolute.startswith(f"{directory}/")
        for directory in _ENGINE_DIRECTORIES
    ):
        raise InvalidPath(
            f"{absolute} is a system directory, where nothing can be mounted.",
            hint="Mount on another directory, such as /data or /workspace/data.",
            path=absolute,
        )
    return absolute


def check_host() -> None:
    """Raise if this host cannot mount buckets."""
    if importlib.util.find_spec("obstore") is None:
        raise MissingDependency(
            "buckets need obstore, which is not installed on the server.",
            hint="Run `pip install 'smokebox[bucket]'` there.",
            extra="bucket",
        )
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise Unsupported(
            f"this host has no {DEVICE} that the engine may open, so it cannot mount buckets.",
            hint=f"Run: modprobe fuse; in Docker add --device {DEVICE}.",
            operation="mount",
        )


def _parse_bucket(bucket: object) -> tuple[str, str]:
    """Return the name of a bucket and a folder in it."""
    if isinstance(bucket, str):
        name, _, folder = bucket.removeprefix("s3://").partition("/")
        if BUCKET_NAME.fullmatch(name) and (not folder or bucket.startswith("s3://")):
            return name, folder.strip("/")
    raise InvalidOption(
        f"{bucket!r:.200} is not an S3 bucket.",
        hint="Use its name of 3 to 63 lower-case letters, digits, dots and hyphens, "
        "or s3://name/folder.",
        option="bucket",
        value=str(bucket),
    )
