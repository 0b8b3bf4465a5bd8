"""Time zones as the TZ variable and dates name them."""

from __future__ import annotations

import re
from datetime import UTC, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

_POSIX = re.compile(r"<?([A-Za-z0-9+-]{3,}?)>?([+-]?\d{1,2})(?::?(\d{2}))?")

# The names that GNU date knows wherever it runs.
_ABBREVIATIONS = {
    "utc": 0, "gmt": 0, "z": 0, "wet": 0, "est": -5, "edt": -4, "cst": -6, "cdt": -5,
    "mst": -7, "mdt": -6, "pst": -8, "pdt": -7, "cet": 1, "cest": 2, "met": 1, "bst": 1,
    "eet": 2, "eest": 3, "msk": 3, "jst": 9, "ist": 5.5, "sgt": 8,
}  # fmt: skip


def zone_from(name: str | None) -> tzinfo:
    """The zone TZ names; UTC where it names none, as in a C library."""
    text = (name or "").removeprefix(":")
    if not text:
        return UTC
    try:
        return ZoneInfo(text)
    except (ValueError, OSError, KeyError):
        match = _POSIX.fullmatch(text)
    if not match:
        return UTC
    # POSIX counts westward: UTC-3 is three hours east of Greenwich.
    hours = int(match[2])
    minutes = int(match[3] or 0) * (-1 if match[2].startswith("-") else 1)
    if abs(hours) > 23:
        return UTC
    return timezone(-timedelta(hours=hours, minutes=minutes), match[1])


def abbreviated_zone(word: str) -> tzinfo | None:
    """The zone of an abbreviation such as EST, or None."""
    hours = _ABBREVIATIONS.get(word.lower())
    return None if hours is None else timezone(timedelta(hours=hours), word.upper())
