"""The pictures that models can look at."""

from __future__ import annotations

import re

# 5 MiB once in base64, the smallest limit among the providers.
MAX_IMAGE_BYTES = 5 * 1024 * 1024 * 3 // 4

_MAGIC = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
}


def image_type(data: bytes) -> str | None:
    """The media type of a PNG, JPEG, GIF or WebP image, by its first bytes; else None."""
    return next((kind for kind, magic in _MAGIC.items() if magic.match(data)), None)
