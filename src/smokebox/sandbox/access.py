"""Endpoint and credentials of an S3 bucket."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace


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


def _first(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
