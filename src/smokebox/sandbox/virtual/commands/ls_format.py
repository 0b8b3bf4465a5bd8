"""Output of `ls`: lines, long lines, columns, sizes and times."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime
from stat import filemode
from typing import TYPE_CHECKING, TypeAlias

from smokebox.sandbox.virtual.commands.arguments import UsageError
from smokebox.sandbox.virtual.commands.date_format import format_time, zone_from

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import tzinfo

    from smokebox.sandbox.filesystems.filesystem import Entry
    from smokebox.sandbox.virtual.command import CommandCall
    from smokebox.sandbox.virtual.commands.arguments import Arguments

Key: TypeAlias = tuple[float, str, str]

_HALF_A_YEAR = 31556952 // 2
_KINDS = {"directory": 0o040000, "symlink": 0o120000, "file": 0o100000, "other": 0o020000}
_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of a listing. `behind` is the target of a symlink, if it matters."""

    name: str
    entry: Entry
    target: str | None = None
    behind: Entry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Formatting options."""

    long: bool
    columns: str
    marks: str
    order: Callable[[Item], Key]
    reverse: bool
    base: int
    blocks: bool
    inode: bool
    quote: bool
    owner: str
    group: str
    zone: tzinfo
    time_style: str
    width: int
    end: str

    @classmethod
    def read(cls, arguments: Arguments, call: CommandCall) -> Style:
        """Return the style for a command line; the last of several layouts wins, as in GNU's."""
        layout = next((n for n, _ in reversed(arguments.options) if n in "1lCxmgno"), "")
        layout = layout or {"dir": "C", "vdir": "l"}.get(call.name, "1")
        long = arguments.has("l", "g", "n", "o", "full-time") or call.name == "vdir"
        user = call.env.get("USER") or call.env.get("LOGNAME") or "user"
        user = "1000" if arguments.has("n") else user
        width = arguments.last("w") or call.env.get("COLUMNS") or "80"
        return cls(
            long=long and layout not in ("C", "x", "m"),
            columns=layout if layout in ("C", "x", "m") else "",
            marks=_marks(arguments),
            order=_order(arguments),
            reverse=arguments.has("r"),
            base=1000 if arguments.has("si") else 1024 if arguments.has("h") else 0,
            blocks=arguments.has("s"),
            inode=arguments.has("i"),
            quote=arguments.has("Q"),
            owner="" if arguments.has("g") else user,
            group="" if arguments.has("G", "o") else user,
            zone=zone_from(call.env.get("TZ")),
            time_style="full-iso"
            if arguments.has("full-time")
            else arguments.last("time-style") or "",
            width=int(width) if width.isdigit() else 80,
            end="\0" if arguments.has("zero") else "\n",
        )

    def total(self, items: list[Item]) -> str:
        """Return the line above a long listing."""
        return f"total {self.blocks_of(sum(_allocated(item.entry) for item in items))}"

    def blocks_of(self, size: int) -> str:
        """Return an allocated size, in kilobytes or human-readable."""
        return human(size, self.base) if self.base else str(size // 1024)


def _marks(arguments: Arguments) -> str:
    given = [
        (name, value)
        for name, value in arguments.options
        if name in ("F", "p", "classify", "indicator-style")
    ]
    if not given:
        return ""
    name, value = given[-1]
    if name == "indicator-style":
        return {"slash": "p", "file-type": "t", "classify": "F"}.get(value, "")
    if name == "classify":
        return "" if value in ("never", "no", "none", "auto", "tty", "if-tty") else "F"
    return name


def _order(arguments: Arguments) -> Callable[[Item], Key]:
    sorts = {"S": "size", "t": "time", "U": "none", "X": "extension", "v": "version", "f": "none"}
    chosen = [
        sorts.get(n, v if n == "sort" else "")
        for n, v in arguments.options
        if n in sorts or n == "sort"
    ]
    name = chosen[-1] if chosen else "name"
    if name not in _ORDERS:
        raise UsageError(f"invalid argument '{name}' for '--sort'")
    return _ORDERS[name]


_ORDERS: dict[str, Callable[[Item], Key]] = {
    "name": lambda item: (0, item.name, ""),
    "none": lambda item: (0, "", ""),
    "size": lambda item: (-_size(item), item.name, ""),
    "time": lambda item: (-item.entry.mtime, item.name, ""),
    "extension": lambda item: (0, _extension(item.name), item.name),
    "version": lambda item: (0, _version(item.name), item.name),
    "width": lambda item: (len(item.name), item.name, ""),
}


def _extension(name: str) -> str:
    return name[name.rindex(".") :] if "." in name else ""


def _version(name: str) -> str:
    # Digits are padded to equal length so that numbers compare as numbers.
    return re.sub(r"\d+", lambda match: match[0].zfill(20), name)


def _allocated(entry: Entry) -> int:
    if entry.kind == "directory":
        return _BLOCK
    return 0 if entry.kind != "file" else -(-entry.size // _BLOCK) * _BLOCK


def _size(item: Item) -> int:
    if item.target is not None:
        return len(item.target.encode())
    return _BLOCK if item.entry.kind == "directory" else item.entry.size


def human(size: int, base: int = 1024) -> str:
    """Return a human-readable size, rounded up as GNU does: 999, 1.1K, 12M."""
    if size < base:
        return str(size)
    units = "kMGTPE" if base == 1000 else "KMGTPE"
    power = 0
    scale = 1
    while size >= scale * base and power < len(units):
        scale *= base
        power += 1
    tenths = -(-size * 10 // scale)
    if tenths < 100:
        return f"{tenths // 10}.{tenths % 10}{units[power - 1]}"
    whole = -(-size // scale)
    return (
        f"1.0{units[power]}"
        if whole >= base and power < len(units)
        else f"{whole}{units[power - 1]}"
    )


def _label(item: Item, style: Style) -> str:
    name = (
        '"' + item.name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if style.quote
        else item.name
    )
    if item.target is None:
        return name + _mark(item.entry, style)
    behind = _mark(item.behind, style) if item.behind is not None else ""
    return f"{name} -> {item.target}{behind}"


def _mark(entry: Entry, style: Style) -> str:
    if not style.marks:
        return ""
    if entry.kind == "directory":
        return "/"
    if style.marks == "p":
        return ""
    if entry.kind == "symlink":
        return "@"
    return "*" if style.marks == "F" and entry.mode & 0o111 else ""


def in_lines(items: list[Item], style: Style) -> str:
    """Format one item per line, long or short."""
    rows = [_fields(item, style) for item in items]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))] if rows else []
    return "".join(
        "".join(
            _padded(cell, width, n, style)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + _label(item, style)
        + style.end
        for row, item in zip(rows, items, strict=True)
    )


def _fields(item: Item, style: Style) -> list[str]:
    """Return the columns before the name."""
    entry = item.entry
    fields = ["?"] if style.inode else []
    if style.blocks:
        fields.append(style.blocks_of(_allocated(entry)))
    if not style.long:
        return fields
    links = "2" if entry.kind == "directory" else "1"
    fields += [mode_text(entry), links]
    fields += [f"\0{who}" for who in (style.owner, style.group) if who]
    fields += [
        human(_size(item), style.base) if style.base else str(_size(item)),
        _format_mtime(entry.mtime, style),
    ]
    return fields


def _padded(cell: str, width: int, index: int, style: Style) -> str:
    # Owner and group, marked by a NUL, are left-aligned; the rest is right-aligned.
    return (
        f"{cell.lstrip(chr(0)).ljust(width - 1)} "
        if cell.startswith("\0")
        else f"{cell.rjust(width)} "
    )


def mode_text(entry: Entry) -> str:
    """Return the ten mode characters, such as `drwxr-xr-x`."""
    mode = 0o777 if entry.kind == "symlink" else entry.mode & 0o7777
    return filemode(_KINDS[entry.kind] | mode)


def _format_mtime(mtime: float, style: Style) -> str:
    if not mtime:
        return "?"
    moment = datetime.fromtimestamp(mtime, style.zone)
    if style.time_style.startswith("+"):
        return format_time(style.time_style[1:].partition("\n")[0], moment, int(mtime % 1 * 1e9))
    if style.time_style == "full-iso":
        return format_time("%Y-%m-%d %H:%M:%S.%N %z", moment, int(mtime % 1 * 1e9))
    recent = 0 <= time.time() - mtime < _HALF_A_YEAR
    if style.time_style == "long-iso":
        return format_time("%Y-%m-%d %H:%M", moment)
    if style.time_style == "iso":
        return format_time("%m-%d %H:%M" if recent else "%Y-%m-%d ", moment)
    return format_time("%b %e %H:%M" if recent else "%b %e  %Y", moment)


def in_columns(items: list[Item], style: Style) -> str:
    """Format columns: down (`-C`), across (`-x`), or separated by commas (`-m`)."""
    labels = [
        "".join(f"{cell} " for cell in _fields(item, style)) + _label(item, style) for item in items
    ]
    if not labels:
        return ""
    if style.columns == "m":
        return _with_commas(labels, style.width)
    for count in range(len(labels), 0, -1):
        rows = -(-len(labels) // count)
        down = style.columns == "C"
        grid = [
            labels[n::rows] if down else labels[n * count : (n + 1) * count] for n in range(rows)
        ]
        widths = [max(len(row[n]) for row in grid if n < len(row)) + 2 for n in range(len(grid[0]))]
        if len(grid[0]) < count and down:
            continue
        if sum(widths) - 2 < style.width or count == 1:
            return "".join(_row(row, widths) for row in grid)
    return ""


def _row(row: list[str], widths: list[int]) -> str:
    text = ""
    place = start = 0
    for label, width in zip(row, widths, strict=False):
        text += _gap(place, start) + label
        place = start + len(label)
        start += width
    return text + "\n"


def _gap(place: int, start: int) -> str:
    # GNU pads with tabs if a tab stop lies between.
    gap = ""
    while place < start:
        if start // 8 > (place + 1) // 8:
            gap += "\t"
            place += 8 - place % 8
        else:
            gap += " "
            place += 1
    return gap


def _with_commas(labels: list[str], width: int) -> str:
    lines = [""]
    for index, label in enumerate(labels):
        piece = label + (", " if index < len(labels) - 1 else "")
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) >= width:
            lines.append("")
        lines[-1] += piece
    return (
        "\n".join(line.rstrip(" ") if n < len(lines) - 1 else line for n, line in enumerate(lines))
        + "\n"
    )
