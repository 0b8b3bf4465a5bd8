"""Valid names of buckets and of folders in them."""

from __future__ import annotations

import re

from smokebox.errors import InvalidOption

# The prefix is part of every signed URL.
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


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
