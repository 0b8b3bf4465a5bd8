"""Parser of the dates that `date -d` accepts, as GNU reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING

from smokebox.sandbox.virtual.commands.date_format import abbreviated_zone, zone_from

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import tzinfo

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = (
    r"(?P<day>mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nes(?:day)?)?|thu(?:r(?:s(?:day)?)?)?"
    r"|fri(?:day)?|sat(?:urday)?|sun(?:day)?)\.?,?"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?"
    r"|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_UNIT = r"(?P<unit>years?|months?|fortnights?|weeks?|days?|hours?|minutes?|mins?|seconds?|secs?)"
_ORDINALS = {
    "last": -1, "this": 0, "next": 1, "first": 1, "third": 3, "fourth": 4, "fifth": 5,
    "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12,
}  # fmt: skip
_ORDINAL = rf"(?P<ordinal>{'|'.join(_ORDINALS)})"
_SECONDS = {"hour": 3600, "minute": 60, "min": 60, "second": 1, "sec": 1}


_MAX_LENGTH = 1000


class NotADate(ValueError):
    """Text that is not a date, or a day that does not exist."""


@dataclass(slots=True)
class _Reading:
    """Fields found so far."""

    # None if the year was omitted.
    date: tuple[int | None, int, int] | None = None
    time: tuple[int, int, int, int] | None = None
    zone: tzinfo | None = None
    weekday: tuple[int, int] | None = None
    years: int = 0
    months: int = 0
    days: int = 0
    nanoseconds: int = 0
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """Point in time with nanoseconds and a time zone."""

    when: datetime
    nanoseconds: int = 0


def parse_date(text: str, now: datetime) -> Moment:
    """Parse a date. Omitted fields and the time zone come from `now`."""
    if len(text) > _MAX_LENGTH:
        raise NotADate(text)
    rest = re.sub(r"\([^()]*\)", " ", text).strip().lower()
    shown_in = now.tzinfo
    if match := re.match(r'tz="([^"]*)"\s*', rest):
        now = now.astimezone(zone_from(text.strip()[4 : match.end(1)]))
        rest = rest[match.end() :]
    if match := re.fullmatch(r"@(-?\d+)(?:[.,](\d+))?", rest):
        return _from_epoch(int(match[1]), match[2] or "", shown_in)
    reading = _Reading()
    while rest := rest.lstrip(" \t\n,"):
        for pattern, action in _RULES:
            if match := pattern.match(rest):
                action(reading, match)
                rest = rest[match.end() :]
                break
        else:
            raise NotADate(text)
    try:
        found = _combine(reading, now)
        return Moment(found.when.astimezone(shown_in), found.nanoseconds)
    except (ValueError, OverflowError):
        raise NotADate(text) from None


def _from_epoch(seconds: int, fraction: str, zone: tzinfo | None) -> Moment:
    try:
        when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
        return Moment(when.astimezone(zone), int(fraction[:9].ljust(9, "0")))
    except (ValueError, OverflowError):
        raise NotADate(str(seconds)) from None


def _combine(reading: _Reading, now: datetime) -> Moment:
    """Combine the fields into a moment: calendar first, then the clock."""
    zone = reading.zone or now.tzinfo
    base = now.astimezone(zone)
    year, month, day = reading.date or (base.year, base.month, base.day)
    year = base.year if year is None else year
    datetime(year, month, day)
    nanos = 0
    if reading.time is not None:
        hour, minute, second, nanos = reading.time
    elif reading.relative and reading.date is None and reading.weekday is None:
        hour, minute, second, nanos = base.hour, base.minute, base.second, base.microsecond * 1000
    else:
        hour = minute = second = 0
    if reading.weekday is not None and reading.date is None:
        day += _days_until(reading.weekday, datetime(year, month, day).weekday())
    months = (year + reading.years) * 12 + month - 1 + reading.months
    start = datetime(months // 12, months % 12 + 1, 1, hour, minute, second)
    local = (start + timedelta(days=day - 1 + reading.days)).replace(tzinfo=zone)
    total = nanos + reading.nanoseconds
    # Hours are counted in real time, across DST changes.
    exact = local.astimezone(UTC) + timedelta(seconds=total // 1_000_000_000)
    return Moment(exact.astimezone(now.tzinfo), total % 1_000_000_000)


def _days_until(weekday: tuple[int, int], today: int) -> int:
    ordinal, wanted = weekday
    return (wanted - today) % 7 + 7 * (ordinal - (ordinal > 0 and wanted != today))


def _set_date(reading: _Reading, year: int | None, month: int, day: int) -> None:
    if reading.date is not None:
        raise NotADate("two dates")
    reading.date = (year, month, day)


def _full_year(text: str) -> int:
    year = int(text)
    return year + (2000 if year < 69 else 1900) if len(text) <= 2 else year


def _iso_date(reading: _Reading, match: re.Match[str]) -> None:
    _set_date(reading, _full_year(match[1]), int(match[2]), int(match[3]))


def _us_date(reading: _Reading, match: re.Match[str]) -> None:
    year = _full_year(match[3]) if match[3] else None
    _set_date(reading, year, int(match[1]), int(match[2]))


def _named_month(reading: _Reading, match: re.Match[str]) -> None:
    parts = match.groupdict()
    year = _full_year(parts["year"]) if parts.get("year") else None
    _set_date(reading, year, _MONTHS.index(match["month"][:3]) + 1, int(match["date"]))


def _clock(reading: _Reading, match: re.Match[str]) -> None:
    if reading.time is not None:
        raise NotADate("two times")
    parts = match.groupdict()
    hour, minute, second = (int(parts.get(n) or 0) for n in ("hour", "minute", "second"))
    if half := (parts.get("half") or "").replace(".", ""):
        if not 1 <= hour <= 12:
            raise NotADate("an hour of the half day")
        hour = hour % 12 + (12 if half == "pm" else 0)
    if hour > 23 or minute > 59 or second > 60:
        raise NotADate("a time of the day")
    reading.time = (hour, minute, second, int((parts.get("fraction") or "0")[:9].ljust(9, "0")))
    if parts.get("zone"):
        reading.zone = _numeric_zone(parts["zone"])


def _numeric_zone(text: str) -> tzinfo:
    sign = -1 if text[0] == "-" else 1
    hours, colon, minutes = text[1:].partition(":")
    if not colon and len(hours) > 2:
        hours, minutes = hours[:-2], hours[-2:]
    span = timedelta(hours=int(hours), minutes=int(minutes or 0))
    if span >= timedelta(hours=24):
        raise NotADate("a zone")
    return timezone(sign * span)


def _named_zone(reading: _Reading, match: re.Match[str]) -> None:
    reading.zone = abbreviated_zone(match[1])
    if match[2]:
        reading.zone = _numeric_zone(match[2])


def _weekday(reading: _Reading, match: re.Match[str]) -> None:
    if reading.weekday is not None:
        raise NotADate("two days")
    ordinal = _ORDINALS.get(match.groupdict().get("ordinal") or "", 0)
    reading.weekday = (ordinal, _DAYS.index(match["day"][:3]))


def _shift(reading: _Reading, match: re.Match[str]) -> None:
    reading.relative = True
    reading.days += {"tomorrow": 1, "yesterday": -1}.get(match[0].strip(), 0)


def _span(reading: _Reading, match: re.Match[str]) -> None:
    parts = match.groupdict()
    count = _ORDINALS[parts["ordinal"]] if parts.get("ordinal") else _count(parts.get("count"))
    fraction = parts.get("fraction") or ""
    sign = -1 if match["ago"] else 1
    unit = match["unit"].rstrip("s")
    reading.relative = True
    if fraction and unit not in ("second", "sec"):
        raise NotADate("a part of a unit")
    if unit in _SECONDS:
        nanos = abs(count) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
        negative = (parts.get("count") or "").startswith("-") or count < 0
        reading.nanoseconds += (-nanos if negative else nanos) * _SECONDS[unit] * sign
    elif unit in ("year", "month"):
        setattr(reading, f"{unit}s", getattr(reading, f"{unit}s") + sign * count)
    else:
        reading.days += sign * count * {"day": 1, "week": 7, "fortnight": 14}[unit]


def _number(reading: _Reading, match: re.Match[str]) -> None:
    """Parse a bare number: an omitted year, or else an hour, or hours and minutes."""
    digits = match[0]
    if reading.date is not None and reading.date[0] is None and (reading.time or len(digits) > 2):
        reading.date = (_full_year(digits), *reading.date[1:])
    elif reading.time is None and len(digits) <= 4:
        hour, minute = (digits, "0") if len(digits) <= 2 else (digits[:-2], digits[-2:])
        if int(hour) > 23 or int(minute) > 59:
            raise NotADate("a time of the day")
        reading.time = (int(hour), int(minute), 0, 0)
    else:
        raise NotADate("a number")


def _count(text: str | None) -> int:
    return int(text.replace(" ", "")) if text else 1


_TIME = r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:[.,](?P<fraction>\d+))?)?"
_AGO = r"(?P<ago>\s+ago\b)?"
_RULES: list[tuple[re.Pattern[str], Callable[[_Reading, re.Match[str]], None]]] = [
    (re.compile(r"(\d{4,})-(\d{1,2})-(\d{1,2})(?:t(?=\d)|\b)"), _iso_date),
    (re.compile(r"(\d{4})/(\d{1,2})/(\d{1,2})\b"), _iso_date),
    (re.compile(r"(\d{4})(\d{2})(\d{2})(?:t(?=\d)|\b)"), _iso_date),
    (re.compile(r"(\d{1,2})/(\d{1,2})(?:/(\d{2,4}))?\b"), _us_date),
    (
        re.compile(rf"(?P<date>\d{{1,2}})[ -]?{_MONTH}(?:[ ,-]+(?P<year>\d{{4}})\b(?!:))?"),
        _named_month,
    ),
    (
        re.compile(rf"{_MONTH}[ -]?(?P<date>\d{{1,2}})\b(?!:)(?:,?\s+(?P<year>\d{{4}})\b(?!:))?"),
        _named_month,
    ),
    (re.compile(_TIME + r"\s*(?P<half>[ap]\.?m\b\.?)"), _clock),
    (re.compile(_TIME + r"(?:\s*(?P<zone>[+-]\d{1,2}(?::?\d{2})?)(?![\d.]))?"), _clock),
    (re.compile(r"(?P<hour>\d{1,2})\s*(?P<half>[ap]\.?m\b\.?)"), _clock),
    (
        re.compile(
            r"(z|utc?|gmt|[ecmp][sd]t|wet|cest|cet|met|bst|eest|eet|msk|jst|ist|sgt)\b([+-]\d{1,2}(?::?\d{2})?)?"
        ),
        _named_zone,
    ),
    (re.compile(rf"{_ORDINAL}\s+{_DAY}(?![a-z])"), _weekday),
    (re.compile(rf"{_DAY}(?![a-z])"), _weekday),
    (re.compile(r"(?:tomorrow|yesterday|today|now)\b"), _shift),
    (re.compile(rf"{_ORDINAL}\s+{_UNIT}\b{_AGO}"), _span),
    (re.compile(rf"(?P<count>[+-]?\s*\d+)(?:\.(?P<fraction>\d+))?\s*{_UNIT}\b{_AGO}"), _span),
    (re.compile(rf"{_UNIT}\b{_AGO}"), _span),
    (re.compile(r"\d+\b(?![.:/-])"), _number),
]
