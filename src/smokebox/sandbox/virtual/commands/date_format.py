"""`+FORMAT` of `date`: all GNU directives, with flags and widths."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    from collections.abc import Callable


_DIRECTIVE = re.compile(r"%([-_0+^#]*)(\d*)(:{0,3})([%a-zA-Z])")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_MAX_WIDTH = 256

_COMPOUND = {
    "c": "%a %b %e %H:%M:%S %Y", "D": "%m/%d/%y", "F": "%Y-%m-%d", "r": "%I:%M:%S %p",
    "R": "%H:%M", "T": "%H:%M:%S", "x": "%m/%d/%y", "X": "%H:%M:%S", "h": "%b",
}  # fmt: skip


def format_time(template: str, moment: datetime, nanoseconds: int | None = None) -> str:
    """Expand the directives of a template; unknown ones stay unchanged."""
    nanos = moment.microsecond * 1000 if nanoseconds is None else nanoseconds

    def one(match: re.Match[str]) -> str:
        flags, width, colons, letter = match.groups()
        if letter in _COMPOUND:
            text, pad = format_time(_COMPOUND[letter], moment, nanos), " "
            return _cased(_padded(text, flags, width, 0, pad), flags, letter)
        if letter == "N":
            return _nanoseconds(nanos, flags, width)
        if letter == "z":
            return _offset(moment, flags, width, len(colons))
        number = _NUMBERS.get(letter)
        if number is not None:
            return _padded(str(number.value(moment)), flags, width, number.width, number.pad)
        text_of = _TEXTS.get(letter)
        if text_of is None or colons:
            return match[0]
        return _cased(_padded(text_of(moment), flags, width, 0, " "), flags, letter)

    return _DIRECTIVE.sub(one, template)


class _Number:
    __slots__ = ("pad", "value", "width")

    def __init__(self, value: Callable[[datetime], int], width: int, pad: str = "0") -> None:
        self.value = value
        self.width = width
        self.pad = pad


_NUMBERS = {
    "C": _Number(lambda t: t.year // 100, 2),
    "d": _Number(lambda t: t.day, 2),
    "e": _Number(lambda t: t.day, 2, " "),
    "g": _Number(lambda t: t.isocalendar().year % 100, 2),
    "G": _Number(lambda t: t.isocalendar().year, 4),
    "H": _Number(lambda t: t.hour, 2),
    "I": _Number(lambda t: t.hour % 12 or 12, 2),
    "j": _Number(lambda t: t.timetuple().tm_yday, 3),
    "k": _Number(lambda t: t.hour, 2, " "),
    "l": _Number(lambda t: t.hour % 12 or 12, 2, " "),
    "m": _Number(lambda t: t.month, 2),
    "M": _Number(lambda t: t.minute, 2),
    "q": _Number(lambda t: (t.month + 2) // 3, 1),
    "s": _Number(lambda t: _epoch(t), 1),
    "S": _Number(lambda t: t.second, 2),
    "u": _Number(lambda t: t.isoweekday(), 1),
    "U": _Number(lambda t: (t.timetuple().tm_yday + 6 - t.isoweekday() % 7) // 7, 2),
    "V": _Number(lambda t: t.isocalendar().week, 2),
    "w": _Number(lambda t: t.isoweekday() % 7, 1),
    "W": _Number(lambda t: (t.timetuple().tm_yday + 6 - t.weekday()) // 7, 2),
    "y": _Number(lambda t: t.year % 100, 2),
    "Y": _Number(lambda t: t.year, 4),
}

_TEXTS: dict[str, Callable[[datetime], str]] = {
    "%": lambda t: "%",
    "n": lambda t: "\n",
    "t": lambda t: "\t",
    "a": lambda t: _DAYS[t.weekday()][:3],
    "A": lambda t: _DAYS[t.weekday()],
    "b": lambda t: _MONTHS[t.month - 1][:3],
    "B": lambda t: _MONTHS[t.month - 1],
    "p": lambda t: "AM" if t.hour < 12 else "PM",
    "P": lambda t: "am" if t.hour < 12 else "pm",
    "Z": lambda t: t.tzname() or "",
}


def _epoch(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)


def _padded(text: str, flags: str, width: str, usual: int, pad: str) -> str:
    for flag in flags:
        if flag == "-":
            return text
        pad = {"_": " ", "0": "0", "+": "0"}.get(flag, pad)
    wanted = min(int(width), _MAX_WIDTH) if width else usual
    sign = "-" if text.startswith("-") and pad == "0" else ""
    return sign + text.removeprefix(sign).rjust(wanted - len(sign), pad)


def _cased(text: str, flags: str, letter: str) -> str:
    if "^" in flags:
        return text.upper()
    if "#" in flags:
        return text.lower() if letter in "pZ" else text.upper()
    return text


def _nanoseconds(nanos: int, flags: str, width: str) -> str:
    text = f"{nanos:09d}"
    if "-" in flags:
        return text.rstrip("0") or "0"
    count = min(int(width), _MAX_WIDTH) if width else 9
    return text[:count].ljust(count, "0")


def _offset(moment: datetime, flags: str, width: str, colons: int) -> str:
    seconds = int((moment.utcoffset() or timedelta()).total_seconds())
    sign = "-" if seconds < 0 else "+"
    hours, rest = divmod(abs(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    text = {
        0: f"{hours:02d}{minutes:02d}",
        1: f"{hours:02d}:{minutes:02d}",
        2: f"{hours:02d}:{minutes:02d}:{seconds:02d}",
        3: f"{hours:02d}:{minutes:02d}" if minutes else f"{hours:02d}",
    }[colons]
    wanted = min(int(width), _MAX_WIDTH) - 1 if width else 0
    return sign + text.rjust(wanted, "0")


_POSIX = re.compile(r"<?([A-Za-z0-9+-]{3,}?)>?([+-]?\d{1,2})(?::?(\d{2}))?")

# Names that GNU date knows on every system.
_ABBREVIATIONS = {
    "utc": 0, "gmt": 0, "z": 0, "wet": 0, "est": -5, "edt": -4, "cst": -6, "cdt": -5,
    "mst": -7, "mdt": -6, "pst": -8, "pdt": -7, "cet": 1, "cest": 2, "met": 1, "bst": 1,
    "eet": 2, "eest": 3, "msk": 3, "jst": 9, "ist": 5.5, "sgt": 8,
}  # fmt: skip


def zone_from(name: str | None) -> tzinfo:
    """Return the zone that TZ names; UTC if it names none, as in a C library."""
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
    """Return the zone of an abbreviation such as EST, or None."""
    hours = _ABBREVIATIONS.get(word.lower())
    return None if hours is None else timezone(timedelta(hours=hours), word.upper())
