"""`stat`, with GNU's format directives for the metadata that a sandbox has."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.filesystems.filesystem import Entry
from smokebox.sandbox.virtual.command import CommandOutput, describe
from smokebox.sandbox.virtual.commands.arguments import UsageError, failure, parse
from smokebox.sandbox.virtual.commands.date_format import format_time, zone_from
from smokebox.sandbox.virtual.commands.ls_format import mode_text

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandCall
    from smokebox.types import FileInfo

_LONG = {
    "format=": "c", "printf=": "printf", "dereference": "L", "terse": "t",
    "file-system": "f", "cached=": "cached",
}  # fmt: skip
_DIRECTIVE = re.compile(r"%([-+ #0]*)(\d*)(?:\.(\d+))?([%a-zA-Z])")
_ESCAPE = re.compile(r"\\([abefnrtv\\\"]|[0-7]{1,3}|x[0-9a-fA-F]{1,2})")
_ESCAPES = dict(zip('abefnrtv\\"', '\a\b\033\f\n\r\t\v\\"', strict=True))
_NAMES = {"directory": "directory", "symlink": "symbolic link", "other": "character special file"}
_TYPE_BITS = {"directory": 0o040000, "symlink": 0o120000, "file": 0o100000, "other": 0o020000}
_MAX_WIDTH = 256
_DEFAULT_FORMAT = (
    "  File: {name}\n  Size: %-10s\tBlocks: %-10b IO Block: %-6o %F\n"
    "Access: (%04a/%10.10A)  Uid: (%5u/%8U)   Gid: (%5g/%8G)\n"
    "Modify: %y\n"
)


def stat(call: CommandCall) -> CommandOutput:
    """Print the metadata of each file."""
    try:
        arguments = parse(call.args, "Lfc:t", _LONG)
        if not arguments.operands:
            raise UsageError("missing operand")
        if arguments.has("f"):
            raise UsageError("there are no file systems to report on in this sandbox")
    except UsageError as error:
        return failure("stat", str(error))
    printf = arguments.last("printf")
    template = arguments.last("c")
    template = _DEFAULT_FORMAT if template is None else f"{template}\n"
    if arguments.has("t"):
        template = "%n %s %b %f %u %g %Y %o\n"
    lines: list[str] = []
    errors: list[str] = []
    for name in arguments.operands:
        try:
            info = call.files.stat(call.path(name), follow_symlinks=arguments.has("L"))
        except PathError as error:
            reason = describe(error).rpartition(": ")[2]
            errors.append(f"stat: cannot statx '{name}': {reason}\n")
            continue
        text = template if printf is None else _unescaped(printf)
        if text == _DEFAULT_FORMAT:
            text = text.replace(
                "{name}", _quoted(call, name, info).replace("'", "").replace("%", "%%")
            )
        lines.append(_expand(call, name, info, text))
    return CommandOutput(
        stdout="".join(lines), stderr="".join(errors), exit_code=1 if errors else 0
    )


def _unescaped(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code in _ESCAPES:
            return _ESCAPES[code]
        return chr(int(code[1:], 16) if code[0] == "x" else int(code, 8) & 0xFF)

    return _ESCAPE.sub(one, text)


def _expand(call: CommandCall, name: str, info: FileInfo, template: str) -> str:
    def one(match: re.Match[str]) -> str:
        flags, width, precision, letter = match.groups()
        if letter == "%":
            return "%"
        text = _value(call, name, info, letter)
        if precision is not None:
            text = text[: int(precision)] if letter not in "XYZ" else text
        wanted = min(int(width), _MAX_WIDTH) if width else 0
        if "-" in flags:
            return text.ljust(wanted)
        return text.rjust(wanted, "0" if "0" in flags else " ")

    return _DIRECTIVE.sub(one, template)


def _value(call: CommandCall, name: str, info: FileInfo, letter: str) -> str:
    """Return the value of one directive; `?` for unknown metadata, as GNU prints."""
    mode = 0o777 if info.type == "symlink" else (info.mode or 0) & 0o7777
    size = 4096 if info.type == "directory" else info.size or 0
    user = call.env.get("USER") or call.env.get("LOGNAME") or "user"
    if letter in "xyzXYZ":
        return _time(call, info.mtime, letter)
    return {
        "a": f"{mode:o}",
        "A": mode_text(Entry(info.type, mode=mode)),
        "b": str(8 if info.type == "directory" else -(-size // 4096) * 8),
        "B": "512",
        "f": f"{_TYPE_BITS[info.type] | mode:x}",
        "F": _NAMES.get(info.type, "regular file" if size else "regular empty file"),
        "g": "1000",
        "G": user,
        "h": "2" if info.type == "directory" else "1",
        "n": name,
        "N": _quoted(call, name, info),
        "o": "4096",
        "s": str(size),
        "u": "1000",
        "U": user,
        "w": "-",
        "W": "0",
    }.get(letter, "?")


def _time(call: CommandCall, mtime: float | None, letter: str) -> str:
    # Only one timestamp is kept: it stands for the other two, as on a noatime mount.
    if mtime is None:
        return "?"
    if letter.isupper():
        return str(int(mtime))
    moment = datetime.fromtimestamp(mtime, zone_from(call.env.get("TZ")))
    return format_time("%Y-%m-%d %H:%M:%S.%N %z", moment, int(mtime % 1 * 1_000_000_000))


def _quoted(call: CommandCall, name: str, info: FileInfo) -> str:
    if info.type != "symlink":
        return f"'{name}'"
    return f"'{name}' -> '{call.files.readlink(call.path(name))}'"
