"""Endpoint, credentials and valid names of S3 buckets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace

from smokebox.errors import InvalidOption

# The prefix is part of every signed URL.
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Endpoint and credentials of a bucket; None leaves a field to the environment."""

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    allow_http: bool | None = None
    anonymous: bool = False


def with_environment(access: Access) -> Access:
    """Complete the fields from the environment of this process; AWS variables win over R2's."""
    found = replace(
        access,
        endpoint=access.endpoint or _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        region=access.region or _first("AWS_REGION", "AWS_DEFAULT_REGION"),
    )
    if found.access_key is not None or found.secret_key is not None or found.anonymous:
        return found
    for vendor in ("AWS", "R2"):
        key, secret = _first(f"{vendor}_ACCESS_KEY_ID"), _first(f"{vendor}_SECRET_ACCESS_KEY")
        if key and secret:
            token = _first(f"{vendor}_SESSION_TOKEN")
            return replace(found, access_key=key, secret_key=secret, session_token=token)
    return found


def check_prefix(prefix: str) -> str:
    """Return a folder in a bucket without surrounding slashes; empty for the whole bucket."""
    inner = prefix.strip("/")
    if inner and any(part in ("", ".", "..") for part in inner.split("/")):
        raise InvalidOption(
            f"prefix={prefix!r} is not a folder in a bucket.",
            hint="Use names joined by single slashes, such as 'docs/2024'.",
            option="prefix",
            value=prefix,
        )
    return inner


def _first(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
