"""`touch`, for filesystems in which the shell's own fails."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.virtual.command import CommandOutput, describe
from smokebox.sandbox.virtual.commands.arguments import Arguments, UsageError, failure, parse
from smokebox.sandbox.virtual.commands.date_format import zone_from
from smokebox.sandbox.virtual.commands.date_parse import NotADate, parse_date

if TYPE_CHECKING:
    from datetime import tzinfo

    from smokebox.sandbox.virtual.command import CommandCall

_LONG = {"date=": "d", "no-create": "c", "reference=": "r", "time=": "time", "no-dereference": "h"}
_ACCESS = ("access", "atime", "use")
# [[CC]YY]MMDDhhmm[.ss]
_STAMP = re.compile(r"(\d\d)??(\d\d)?(\d\d)(\d\d)(\d\d)(\d\d)(?:\.(\d\d))?")


def touch(call: CommandCall) -> CommandOutput:
    """Create missing files, and set the modification time of existing ones."""
    try:
        arguments = parse(call.args, "acfhmd:t:r:", _LONG)
        if not arguments.operands:
            raise UsageError("missing file operand")
        mtime = _requested_mtime(call, arguments)
    except (UsageError, PathError) as error:
        text = describe(error) if isinstance(error, PathError) else str(error)
        return failure("touch", text)
    errors = [_one(call, arguments, name, mtime) for name in arguments.operands]
    return CommandOutput(stderr="".join(errors), exit_code=int(any(errors)))


def _one(call: CommandCall, arguments: Arguments, name: str, mtime: float) -> str:
    path = call.path(name)
    # Only the modification time is kept: setting the access time does nothing.
    only_access = arguments.last("time") in _ACCESS or (
        arguments.has("a") and not arguments.has("m")
    )
    try:
        if call.files.exists(path):
            if not only_access:
                call.files.touch(path, mtime)
        elif not arguments.has("c"):
            call.files.touch(path, mtime)
    except PathError as error:
        return f"touch: cannot touch '{name}': {describe(error).rpartition(': ')[2]}\n"
    return ""


def _requested_mtime(call: CommandCall, arguments: Arguments) -> float:
    zone = zone_from(call.env.get("TZ"))
    reference, text, stamp = (arguments.last(option) for option in "rdt")
    if stamp is not None:
        return _parse_stamp(stamp, zone)
    if reference is not None:
        return call.files.stat(call.path(reference)).mtime or 0.0
    if text is None:
        return time.time()
    try:
        moment = parse_date(text.strip() or "00:00", datetime.now(zone))
    except NotADate:
        raise UsageError(f"invalid date format '{text}'") from None
    return moment.when.replace(microsecond=0).timestamp() + moment.nanoseconds / 1e9


def _parse_stamp(text: str, zone: tzinfo) -> float:
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        century, short, month, day, hour, minute, second = match.groups()
        year = datetime.now(zone).year
        if short is not None:
            # POSIX: 69 to 99 are in the last century if none is given.
            year = int(century or (19 if int(short) >= 69 else 20)) * 100 + int(short)
        when = datetime(year, int(month), int(day), int(hour), int(minute), int(second or 0))
        return when.replace(tzinfo=zone).timestamp()
    except ValueError:
        raise UsageError(f"invalid date format '{text}'") from None
