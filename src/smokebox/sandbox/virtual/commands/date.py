"""`date`, with GNU's relative dates."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.virtual.command import CommandOutput, describe
from smokebox.sandbox.virtual.commands.arguments import Arguments, UsageError, failure, parse
from smokebox.sandbox.virtual.commands.date_format import format_time, zone_from
from smokebox.sandbox.virtual.commands.date_parse import Moment, NotADate, parse_date

if TYPE_CHECKING:
    from datetime import tzinfo

    from smokebox.sandbox.virtual.command import CommandCall

_LONG = {
    "date=": "d", "utc": "u", "universal": "u", "reference=": "r", "rfc-email": "R",
    "rfc-2822": "R", "rfc-822": "R", "iso-8601?": "iso", "rfc-3339=": "rfc-3339",
    "set=": "s", "file=": "f", "debug": "debug",
}  # fmt: skip
_ISO = {
    "date": "%Y-%m-%d", "hours": "%Y-%m-%dT%H%:z", "minutes": "%Y-%m-%dT%H:%M%:z",
    "seconds": "%Y-%m-%dT%H:%M:%S%:z", "ns": "%Y-%m-%dT%H:%M:%S,%N%:z",
}  # fmt: skip
_RFC_3339 = {
    "date": "%Y-%m-%d", "seconds": "%Y-%m-%d %H:%M:%S%:z", "ns": "%Y-%m-%d %H:%M:%S.%N%:z",
}  # fmt: skip


def date(call: CommandCall) -> CommandOutput:
    """Print the current time, or the time that `-d` names."""
    try:
        arguments = parse([_long_iso(word) for word in call.args], "d:f:ur:Rs:", _LONG)
        template = _template(arguments)
    except UsageError as error:
        return failure("date", str(error))
    zone = UTC if arguments.has("u") else zone_from(call.env.get("TZ"))
    if arguments.has("s"):
        return failure("date", "cannot set date: Operation not permitted")
    try:
        if (name := arguments.last("f")) is not None:
            dates = [parse_date(line, _now(zone).when) for line in _read_lines(call, name)]
            return CommandOutput(stdout="".join(_format_line(template, one) for one in dates))
        return CommandOutput(stdout=_format_line(template, _requested_time(call, arguments, zone)))
    except NotADate:
        return failure("date", f"invalid date '{arguments.last('d') or ''}'")
    except PathError as error:
        return failure("date", describe(error))


def _long_iso(word: str) -> str:
    """Replace `-I` by its long name, whose value is optional too."""
    if word.startswith("-I"):
        return f"--iso-8601={word[2:]}"
    return word


def _template(arguments: Arguments) -> str:
    templates = [word for word in arguments.operands if word.startswith("+")]
    if len(templates) != len(arguments.operands) or len(templates) > 1:
        others = (word for word in arguments.operands if word not in templates[:1])
        other = next(others, templates[-1:])
        raise UsageError(f"invalid date '{other}'")
    if templates:
        return templates[0][1:]
    if arguments.has("R"):
        return "%a, %d %b %Y %H:%M:%S %z"
    for option, formats in (("iso", _ISO), ("rfc-3339", _RFC_3339)):
        chosen = arguments.last(option)
        if chosen is not None:
            known = [form for name, form in formats.items() if name.startswith(chosen or "date")]
            if not known:
                raise UsageError(f"invalid argument '{chosen}'")
            return known[0]
    return "%a %b %e %H:%M:%S %Z %Y"


def _requested_time(call: CommandCall, arguments: Arguments, zone: tzinfo) -> Moment:
    now = _now(zone)
    if (name := arguments.last("r")) is not None:
        mtime = call.files.stat(call.path(name)).mtime or 0.0
        return Moment(datetime.fromtimestamp(mtime, zone), int(mtime % 1 * 1_000_000_000))
    text = arguments.last("d")
    if text is None:
        return now
    # An empty string is midnight today.
    return parse_date(text.strip() or "00:00", now.when)


def _now(zone: tzinfo) -> Moment:
    nanos = time.time_ns()
    return Moment(
        datetime.fromtimestamp(nanos // 1_000_000_000, zone).replace(
            microsecond=nanos % 1_000_000_000 // 1000
        ),
        nanos % 1_000_000_000,
    )


def _format_line(template: str, moment: Moment) -> str:
    return format_time(template, moment.when, moment.nanoseconds) + "\n"


def _read_lines(call: CommandCall, name: str) -> list[str]:
    text = call.stdin if name == "-" else call.read_file(name).decode("utf-8", "replace")
    return text.splitlines()
