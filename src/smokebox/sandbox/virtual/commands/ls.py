"""`ls`, `dir` and `vdir`, with GNU's flags and C-locale order."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import PathError, PathNotFound
from smokebox.sandbox.filesystems.filesystem import Entry
from smokebox.sandbox.virtual.command import CommandOutput, describe
from smokebox.sandbox.virtual.commands.arguments import Arguments, UsageError, failure, parse
from smokebox.sandbox.virtual.commands.ls_format import Item, Style, in_columns, in_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.sandbox.virtual.command import CommandCall

_SHORT = "1aAbBcCdfFgGhHiklLmnNopqQrRsStuUvw:xXI:T:"
_LONG = {
    "all": "a", "almost-all": "A", "directory": "d", "human-readable": "h", "reverse": "r",
    "recursive": "R", "size": "s", "inode": "i", "numeric-uid-gid": "n", "no-group": "G",
    "dereference": "L", "si": "si", "full-time": "full-time", "time-style=": "time-style",
    "color?": "color", "colour?": "color", "classify?": "classify", "file-type": "p",
    "indicator-style=": "indicator-style", "sort=": "sort", "time=": "time",
    "group-directories-first": "dirs-first", "hide=": "I", "ignore=": "I", "width=": "w",
    "format=": "format", "quote-name": "Q", "literal": "N", "escape": "b", "kibibytes": "k",
    "show-control-chars": "N", "hide-control-chars": "q", "author": "author", "zero": "zero",
    "dereference-command-line": "H", "ignore-backups": "B", "hyperlink?": "color",
    "quoting-style=": "N", "tabsize=": "T",
}  # fmt: skip


@dataclass(slots=True)
class _Listing:
    call: CommandCall
    arguments: Arguments
    style: Style
    errors: list[str]
    code: int = 0

    def report(self, name: str, error: PathError, *, verb: str, code: int) -> None:
        reason = describe(error).rpartition(": ")[2]
        self.errors.append(f"{self.call.name}: cannot {verb} '{name}': {reason}\n")
        self.code = max(self.code, code)


def ls(call: CommandCall) -> CommandOutput:
    """List files and directory contents."""
    try:
        arguments = parse(call.args, _SHORT, _LONG)
        style = Style.read(arguments, call)
    except UsageError as error:
        return failure(call.name, str(error), 2)
    listing = _Listing(call, arguments, style, [])
    blocks = list(_blocks(listing, arguments.operands or ["."]))
    text = "\n".join(blocks)
    return CommandOutput(stdout=text, stderr="".join(listing.errors), exit_code=listing.code)


def _blocks(listing: _Listing, names: list[str]) -> Iterator[str]:
    """Yield the blocks of output, separated by blank lines."""
    files: list[Item] = []
    directories: list[Item] = []
    for name in names:
        item = _operand(listing, name)
        if item is not None:
            opened = item.entry.kind == "directory" and not listing.arguments.has("d")
            (directories if opened else files).append(item)
    if files:
        yield _render(listing, _sorted(listing, files))
    headed = len(names) > 1 or listing.arguments.has("R")
    for item in _sorted(listing, directories):
        yield from _directory(listing, item.name, headed)


def _operand(listing: _Listing, name: str) -> Item | None:
    path = listing.call.path(name) if name else "/"
    arguments = listing.arguments
    try:
        if not name:
            raise PathNotFound("")
        follow = name.endswith("/") or arguments.has("L", "H")
        entry = _entry(listing, path, follow=follow)
        if (
            entry.kind == "symlink"
            and not arguments.has("d", "F", "classify")
            and not listing.style.long
        ):
            behind = _entry_or_none(listing, path)
            entry = behind if behind is not None and behind.kind == "directory" else entry
        return _item(listing, name, path, entry)
    except PathError as error:
        listing.report(name, error, verb="access", code=2)
        return None


def _entry(listing: _Listing, path: str, *, follow: bool) -> Entry:
    info = listing.call.files.stat(path, follow_symlinks=follow)
    return Entry(info.type, info.size or 0, info.mtime or 0.0, info.mode or 0)


def _entry_or_none(listing: _Listing, path: str) -> Entry | None:
    try:
        return _entry(listing, path, follow=True)
    except PathError:
        return None


def _item(listing: _Listing, name: str, path: str, entry: Entry) -> Item:
    if entry.kind != "symlink":
        return Item(name=name, entry=entry)
    behind = _entry_or_none(listing, path) if listing.style.marks else None
    if listing.arguments.has("L"):
        return Item(name=name, entry=_entry_or_none(listing, path) or entry)
    target = listing.call.files.readlink(path) if listing.style.long else None
    return Item(name=name, entry=entry, target=target, behind=behind)


def _directory(listing: _Listing, name: str, headed: bool) -> Iterator[str]:
    path = listing.call.path(name)
    try:
        entries = listing.call.files.entries(path)
    except PathError as error:
        listing.report(name, error, verb="open directory", code=1 if headed else 2)
        return
    items = [
        _item(listing, child, posixpath.join(path, child), entry)
        for child, entry in entries.items()
        if _is_listed(listing, child)
    ]
    if listing.arguments.has("a", "f"):
        items += [
            _item(listing, dots, "", _parent_entry(listing, path, dots)) for dots in (".", "..")
        ]
    items = _sorted(listing, items)
    head = f"{name}:\n" if headed else ""
    total = f"{listing.style.total(items)}\n" if listing.style.long or listing.style.blocks else ""
    yield head + total + _render(listing, items)
    if listing.arguments.has("R"):
        for item in items:
            if item.entry.kind == "directory" and item.name not in (".", ".."):
                yield from _directory(listing, posixpath.join(name, item.name), True)


def _parent_entry(listing: _Listing, path: str, dots: str) -> Entry:
    place = path if dots == "." else posixpath.dirname(path)
    return _entry_or_none(listing, place) or Entry("directory", mode=0o755)


def _is_listed(listing: _Listing, name: str) -> bool:
    if name.startswith(".") and not listing.arguments.has("a", "A", "f"):
        return False
    return not (listing.arguments.has("B") and name.endswith("~"))


def _sorted(listing: _Listing, items: list[Item]) -> list[Item]:
    style = listing.style
    ordered = sorted(items, key=style.order, reverse=style.reverse)
    if listing.arguments.has("dirs-first"):
        ordered.sort(key=lambda item: (item.behind or item.entry).kind != "directory")
    return ordered


def _render(listing: _Listing, items: list[Item]) -> str:
    if listing.style.columns:
        return in_columns(items, listing.style)
    return in_lines(items, listing.style)
