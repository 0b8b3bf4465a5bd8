"""What a bucket and a folder in it may be called, for whatever opens one."""

from __future__ import annotations

import re

from smokebox.errors import InvalidOption

# What is in the name would be in every address that is signed.
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def check_prefix(prefix: str) -> str:
    """A folder in a bucket, without slashes around it; empty for all of the bucket."""
    inner = prefix.strip("/")
    if inner and any(part in ("", ".", "..") for part in inner.split("/")):
        raise InvalidOption(
            f"prefix={prefix!r} is not a folder in a bucket.",
            hint="Use names joined by single slashes, such as 'docs/2024'.",
            option="prefix",
            value=prefix,
        )
    return inner
