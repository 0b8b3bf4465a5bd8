"""`diff` of files and directories, in GNU's formats."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from smokebox.errors import PathError, PathNotFound
from smokebox.sandbox.virtual.command import CommandOutput, describe
from smokebox.sandbox.virtual.commands.arguments import Arguments, UsageError, failure, parse
from smokebox.sandbox.virtual.commands.date_format import format_time, zone_from
from smokebox.sandbox.virtual.commands.diff_lines import changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smokebox.sandbox.virtual.command import CommandCall
    from smokebox.sandbox.virtual.commands.diff_lines import Change
    from smokebox.types import FileInfo


_LONG = {
    "recursive": "r", "unified?": "u", "context?": "c", "brief": "q", "new-file": "N",
    "unidirectional-new-file": "P", "ignore-case": "i", "ignore-all-space": "w",
    "ignore-space-change": "b", "ignore-blank-lines": "B", "report-identical-files": "s",
    "text": "a", "normal": "normal", "label=": "label", "exclude=": "x", "color?": "color",
    "strip-trailing-cr": "cr", "ignore-trailing-space": "Z", "minimal": "d", "no-dereference": "h",
    "speed-large-files": "d", "expand-tabs": "t", "initial-tab": "T",
}  # fmt: skip


@dataclass(slots=True)
class _Comparison:
    call: CommandCall
    arguments: Arguments
    out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    code: int = 0

    def report(self, text: str, code: int = 1) -> None:
        self.out.append(text)
        self.code = max(self.code, code)

    def report_error(self, text: str) -> None:
        self.errors.append(f"diff: {text}\n")
        self.code = 2


def diff(call: CommandCall) -> CommandOutput:
    """Compare two files, or two directories file by file."""
    try:
        arguments = parse(call.args, "ruU:cC:qNPiwbBsaZdtTx:", _LONG)
        if len(arguments.operands) != 2:
            last = arguments.operands[-1:] or [call.name]
            word = "missing operand after" if len(arguments.operands) < 2 else "extra operand"
            raise UsageError(f"{word} '{last[0]}'")
        for name in ("U", "C", "u", "c"):
            if (value := arguments.last(name)) and not value.isdigit():
                raise UsageError(f"invalid context length '{value}'")
    except UsageError as error:
        return failure("diff", str(error), 2)
    comparison = _Comparison(call, arguments)
    _compare_operands(comparison, *arguments.operands)
    return CommandOutput(
        stdout="".join(comparison.out),
        stderr="".join(comparison.errors),
        exit_code=comparison.code,
    )


def _compare_operands(comparison: _Comparison, left: str, right: str) -> None:
    kinds = [_kind(comparison, name) for name in (left, right)]
    if None in kinds:
        both = kinds == [None, None]
        if both or not comparison.arguments.has("N") or "directory" in kinds:
            for name, kind in zip((left, right), kinds, strict=True):
                if kind is None:
                    comparison.report_error(f"{name}: No such file or directory")
            return
    if kinds == ["directory", "directory"]:
        return _folders(comparison, left, right)
    # A directory and a file: compare with the file of that name in the directory.
    if kinds[0] == "directory":
        left = posixpath.join(left, posixpath.basename(right))
    if kinds[1] == "directory":
        right = posixpath.join(right, posixpath.basename(left))
    return _files(comparison, left, right, headed=False)


def _kind(comparison: _Comparison, name: str) -> str | None:
    info = _info(comparison, name)
    if info is not None:
        return info.type
    # `<(...)` is not a file of the sandbox, but can be read.
    return "file" if name == "-" or name.startswith("/dev/") else None


def _info(comparison: _Comparison, name: str) -> FileInfo | None:
    if name == "-":
        return None
    try:
        return comparison.call.files.stat(comparison.call.path(name))
    except PathError:
        return None


def _folders(comparison: _Comparison, left: str, right: str) -> None:
    names = [_names(comparison, folder) for folder in (left, right)]
    for name in sorted(names[0] | names[1]):
        paths = posixpath.join(left, name), posixpath.join(right, name)
        present = [name in side for side in names]
        if all(present):
            _both(comparison, *paths)
        else:
            _one_sided(comparison, (left, right), paths, name, 0 if present[0] else 1)


def _one_sided(
    comparison: _Comparison,
    folders: tuple[str, str],
    paths: tuple[str, str],
    name: str,
    side: int,
) -> None:
    shown = comparison.arguments.has("N") or (comparison.arguments.has("P") and side == 1)
    if not shown:
        return comparison.report(f"Only in {folders[side]}: {name}\n")
    if _kind(comparison, paths[side]) != "directory":
        return _files(comparison, *paths, headed=True)
    if comparison.arguments.has("r"):
        return _folders(comparison, *paths)
    return None


def _names(comparison: _Comparison, folder: str) -> set[str]:
    patterns = [value for name, value in comparison.arguments.options if name == "x"]
    try:
        names = comparison.call.files.readdir(comparison.call.path(folder))
    except PathNotFound:
        return set()
    except PathError as error:
        comparison.report_error(f"{folder}: {describe(error).rpartition(': ')[2]}")
        return set()
    return {n for n in names if not any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def _both(comparison: _Comparison, left: str, right: str) -> None:
    kinds = [_kind(comparison, name) for name in (left, right)]
    if None in kinds:
        for name, kind in zip((left, right), kinds, strict=True):
            if kind is None:
                comparison.report_error(f"{name}: No such file or directory")
    elif kinds == ["directory", "directory"]:
        if comparison.arguments.has("r"):
            _folders(comparison, left, right)
        else:
            comparison.out.append(f"Common subdirectories: {left} and {right}\n")
    elif "directory" in kinds:
        words = ["directory" if kind == "directory" else "regular file" for kind in kinds]
        comparison.report(f"File {left} is a {words[0]} while file {right} is a {words[1]}\n")
    else:
        _files(comparison, left, right, headed=True)


def _files(comparison: _Comparison, left: str, right: str, *, headed: bool) -> None:
    arguments = comparison.arguments
    try:
        data = [_read(comparison, name) for name in (left, right)]
    except PathError as error:
        name = left if error.path == comparison.call.path(left) else right
        return comparison.report_error(f"{name}: {describe(error).rpartition(': ')[2]}")
    if data[0] == data[1]:
        if arguments.has("s"):
            comparison.out.append(f"Files {left} and {right} are identical\n")
        return None
    if not arguments.has("a") and any(b"\0" in side[:32768] for side in data):
        word = "Files" if arguments.has("q") else "Binary files"
        return comparison.report(f"{word} {left} and {right} differ\n")
    text = _compared(
        comparison, (left, right), [side.decode("utf-8", "surrogateescape") for side in data]
    )
    if not text:
        if arguments.has("s"):
            comparison.out.append(f"Files {left} and {right} are identical\n")
        return None
    if arguments.has("q"):
        return comparison.report(f"Files {left} and {right} differ\n")
    head = f"diff {_flags(comparison)}{left} {right}\n" if headed else ""
    return comparison.report(head + text)


def _read(comparison: _Comparison, name: str) -> bytes:
    if name == "-":
        return comparison.call.stdin.encode()
    try:
        return comparison.call.read_file(name)
    except PathNotFound:
        if comparison.arguments.has("N", "P"):
            return b""
        raise


def _flags(comparison: _Comparison) -> str:
    """Return the options as given, for the header of each file."""
    operands = set(comparison.arguments.operands)
    words = [word for word in comparison.call.args if word not in operands]
    quoted = [word if re.fullmatch(r"[\w@%+=:,./-]+", word) else f"'{word}'" for word in words]
    return "".join(f"{word} " for word in quoted)


def _compared(comparison: _Comparison, names: tuple[str, str], texts: list[str]) -> str:
    arguments = comparison.arguments
    lines = [re.findall(r"[^\n]*\n|[^\n]+", text) for text in texts]
    key = _key(arguments)
    found = changes(*([key(line) for line in side] for side in lines))
    if arguments.has("B"):
        found = [c for c in found if _matters(lines, c.a_start, c.a_end, c.b_start, c.b_end)]
    if not found:
        return ""
    labels = [value for name, value in arguments.options if name == "label"]
    sides = [
        Side(
            lines=side,
            label=labels[n] if n < len(labels) else None,
            name=names[n],
            info=_info(comparison, names[n]),
        )
        for n, side in enumerate(lines)
    ]
    zone = comparison.call.env.get("TZ")
    last = next((n for n, _ in reversed(arguments.options) if n in "uUcC" or n == "normal"), "")
    if last in ("u", "U", "c", "C"):
        given = arguments.last("U", "C") or arguments.last("u", "c") or "3"
        write = unified if last in ("u", "U") else context
        return write(sides[0], sides[1], found, int(given), zone)
    return normal(sides[0], sides[1], found)


def _matters(lines: list[list[str]], a_low: int, a_high: int, b_low: int, b_high: int) -> bool:
    return any(line.strip("\n") for line in lines[0][a_low:a_high] + lines[1][b_low:b_high])


def _key(arguments: Arguments) -> Callable[[str], str]:
    """Return the part of a line that is compared, under the options that ignore something."""
    steps: list[Callable[[str], str]] = []
    if arguments.has("cr"):
        steps.append(lambda line: line.replace("\r\n", "\n"))
    if arguments.has("i"):
        steps.append(str.lower)
    if arguments.has("w"):
        steps.append(lambda line: "".join(line.split()))
    elif arguments.has("b"):
        steps.append(lambda line: re.sub(r"[ \t\r\f\v]+", " ", line.rstrip()))
    elif arguments.has("Z"):
        steps.append(str.rstrip)

    def key(line: str) -> str:
        for step in steps:
            line = step(line)
        return line

    return key


_TIME = "%Y-%m-%d %H:%M:%S.%N %z"
_NO_NEWLINE = "\n\\ No newline at end of file\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two files: its lines, and the name in its header."""

    lines: list[str]
    name: str
    label: str | None = None
    info: FileInfo | None = None

    def head(self, zone: str | None) -> str:
        """Return the header: name and time, or the label."""
        if self.label is not None:
            return self.label
        mtime = (self.info.mtime if self.info else None) or 0.0
        moment = datetime.fromtimestamp(mtime, zone_from(zone) if zone else UTC)
        return f"{self.name}\t{format_time(_TIME, moment, int(mtime % 1 * 1_000_000_000))}"


def _written(mark: str, lines: list[str]) -> str:
    return "".join(f"{mark}{x if x.endswith(chr(10)) else x + _NO_NEWLINE}" for x in lines)


def normal(a: Side, b: Side, found: list[Change]) -> str:
    """Format changes as plain `diff`: `2c2`, `<` and `>`."""
    parts = []
    for change in found:
        old, new = a.lines[change.a_start : change.a_end], b.lines[change.b_start : change.b_end]
        letter = "c" if old and new else "d" if old else "a"
        where = _range(change.a_start, change.a_end) + letter + _range(change.b_start, change.b_end)
        middle = "---\n" if old and new else ""
        parts.append(f"{where}\n{_written('< ', old)}{middle}{_written('> ', new)}")
    return "".join(parts)


def _range(start: int, end: int) -> str:
    if end <= start + 1:
        return str(end if end > start else start)
    return f"{start + 1},{end}"


def _hunks(found: list[Change], size: int) -> Iterator[list[Change]]:
    """Group changes that share context."""
    group: list[Change] = []
    for change in found:
        if group and change.a_start - group[-1].a_end > 2 * size:
            yield group
            group = []
        group.append(change)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Window:
    """Range of lines that a hunk shows."""

    a_low: int
    a_high: int
    b_low: int
    b_high: int


def _window(a: Side, b: Side, group: list[Change], size: int) -> _Window:
    before = min(size, group[0].a_start, group[0].b_start)
    a_room, b_room = len(a.lines) - group[-1].a_end, len(b.lines) - group[-1].b_end
    after = min(size, a_room, b_room)
    return _Window(
        group[0].a_start - before,
        group[-1].a_end + after,
        group[0].b_start - before,
        group[-1].b_end + after,
    )


def unified(a: Side, b: Side, found: list[Change], size: int, zone: str | None) -> str:
    """Format changes as `diff -u`."""
    parts = [f"--- {a.head(zone)}\n+++ {b.head(zone)}\n"]
    for group in _hunks(found, size):
        w = _window(a, b, group, size)
        parts.append(f"@@ -{_span(w.a_low, w.a_high)} +{_span(w.b_low, w.b_high)} @@\n")
        place = w.a_low
        for change in group:
            parts.append(_written(" ", a.lines[place : change.a_start]))
            parts.append(_written("-", a.lines[change.a_start : change.a_end]))
            parts.append(_written("+", b.lines[change.b_start : change.b_end]))
            place = change.a_end
        parts.append(_written(" ", a.lines[place : w.a_high]))
    return "".join(parts)


def _span(start: int, end: int) -> str:
    count = end - start
    return str(end) if count == 1 else f"{start + 1 if count else start},{count}"


def context(a: Side, b: Side, found: list[Change], size: int, zone: str | None) -> str:
    """Format changes as `diff -c`."""
    parts = [f"*** {a.head(zone)}\n--- {b.head(zone)}\n"]
    for group in _hunks(found, size):
        w = _window(a, b, group, size)
        parts.append(f"***************\n*** {_pair(w.a_low, w.a_high)} ****\n")
        if any(change.a_start < change.a_end for change in group):
            runs = [(c.a_start, c.a_end, c.b_start < c.b_end) for c in group]
            parts.append(_marked(a.lines, w.a_low, w.a_high, runs, "-"))
        parts.append(f"--- {_pair(w.b_low, w.b_high)} ----\n")
        if any(change.b_start < change.b_end for change in group):
            runs = [(c.b_start, c.b_end, c.a_start < c.a_end) for c in group]
            parts.append(_marked(b.lines, w.b_low, w.b_high, runs, "+"))
    return "".join(parts)


def _pair(start: int, end: int) -> str:
    if end <= start + 1:
        return str(end)
    return f"{start + 1},{end}"


def _marked(
    lines: list[str], low: int, high: int, runs: list[tuple[int, int, bool]], sign: str
) -> str:
    parts = []
    place = low
    for start, end, both in runs:
        parts.append(_written("  ", lines[place:start]))
        parts.append(_written("! " if both else f"{sign} ", lines[start:end]))
        place = end
    parts.append(_written("  ", lines[place:high]))
    return "".join(parts)
