"""What is to be mounted and where, as users say it, checked once."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from smokebox.engine.mounts.fuse_protocol import DEVICE
from smokebox.errors import (
    InvalidOption,
    InvalidPath,
    MissingDependency,
    Unsupported,
)
from smokebox.foundation.paths import resolve
from smokebox.sandbox.access import Access
from smokebox.sandbox.bucket_names import BUCKET_NAME, check_prefix

# What the engine itself has mounted, and what every program needs to be as it is.
_TAKEN = ("/dev", "/proc", "/run/smokebox", "/sys")
_NEEDED = ("/", "/bin", "/etc", "/lib", "/lib64", "/run", "/sbin", "/usr")


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRequest:
    """A bucket, or a folder of it, for one directory of a sandbox.

    It may be at a `private` address, or else at a public one only. `name` is what it is
    called where that is not what the store calls it.
    """

    path: str
    bucket: str
    prefix: str
    read_only: bool
    access: Access = field(repr=False)
    private: bool = False
    name: str | None = None

    def words(self) -> dict[str, object]:
        """All of it for the process that serves it."""
        return {
            "path": self.path,
            "bucket": self.bucket,
            "prefix": self.prefix,
            "read_only": self.read_only,
            "access": asdict(self.access),
            "private": self.private,
            "name": self.name,
        }

    @classmethod
    def of(cls, words: dict[str, Any]) -> MountRequest:
        """What `words` gave."""
        return cls(**{**words, "access": Access(**words["access"])})


def parse_request(
    bucket: str,
    path: str,
    *,
    cwd: str,
    access: Access,
    prefix: str = "",
    read_only: bool = False,
    private: bool = False,
) -> MountRequest:
    """Check what can be checked before anything is asked of anybody."""
    name, folder = _bucket(bucket)
    inside = check_prefix(f"{folder}/{prefix.strip('/')}")
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
        prefix=inside,
        read_only=read_only,
        access=access,
        private=private,
    )


def parse_path(path: str, cwd: str) -> str:
    """Where a bucket may be mounted."""
    found = resolve(path, cwd)
    if found in _NEEDED or any(found == one or found.startswith(f"{one}/") for one in _TAKEN):
        raise InvalidPath(
            f"{found} is the system's: nothing is mounted there.",
            hint="Mount on a directory of its own, such as /data or /workspace/data.",
            path=found,
        )
    return found


def check_host() -> None:
    """Refuse where this host cannot mount buckets."""
    if importlib.util.find_spec("obstore") is None:
        raise MissingDependency(
            "buckets need obstore, which is not installed here.",
            hint="Run: pip install 'smokebox[bucket]', where the server is.",
            extra="bucket",
        )
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise Unsupported(
            f"this host has no {DEVICE} that the engine may open, so it mounts nothing.",
            hint=f"Run: modprobe fuse; in Docker add --device {DEVICE}.",
            operation="mount",
        )


def _bucket(bucket: object) -> tuple[str, str]:
    if isinstance(bucket, str):
        text = bucket.removeprefix("s3://") if bucket.startswith("s3://") else bucket
        name, _, folder = text.partition("/")
        if BUCKET_NAME.fullmatch(name) and (not folder or bucket.startswith("s3://")):
            return name, folder.strip("/")
    raise InvalidOption(
        f"{bucket!r:.200} is not a bucket that speaks S3.",
        hint="Use its name of 3 to 63 lower-case letters, digits, dots and hyphens, "
        "or s3://name/folder.",
        option="bucket",
        value=str(bucket),
    )
