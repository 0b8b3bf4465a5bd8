"""The head of a SKILL.md: the part of YAML that people write there, and errors for the rest.

Every scalar is text. There are mappings, lists, quotes, block scalars and comments; there
are no anchors, tags, flow mappings or documents, which nobody needs to name a skill.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = "str | list[Value] | dict[str, Value]"

_KEY = re.compile(r"([A-Za-z_][\w.-]*|\"[^\"]*\"|'[^']*')\s*:(?:\s+(.*)|\s*)")
_BLOCK = re.compile(r"([|>])([+-]?)\s*(?:#.*)?")
_UNSUPPORTED = {"&": "an anchor", "*": "an alias", "!": "a tag", "{": "a flow mapping"}
_RESERVED = "@`%"


@dataclass(frozen=True, slots=True)
class Document:
    """A head, and the text behind it."""

    head: dict[str, Value] = field(default_factory=dict)
    body: str = ""


def parse_document(text: str) -> Document:
    """Take a file apart. Raises `ValueError` with the line that is not understood."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        raise ValueError("line 1: the file does not begin with `---`, the head of a skill")
    ends = (n for n, line in enumerate(lines) if n and line.rstrip() in ("---", "..."))
    end = next(ends, None)
    if end is None:
        raise ValueError("line 1: the head that begins with `---` has no end")
    return Document(_Head(lines[:end]).parse(), "\n".join(lines[end + 1 :]).strip("\n"))


class _Head:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._next = 1

    def parse(self) -> dict[str, Value]:
        self._skip()
        found = self._mapping(0) if self._next < len(self._lines) else {}
        if self._next < len(self._lines):
            raise self._error("is indented in a way that fits nothing above it")
        return found

    def _mapping(self, indent: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        while self._at(indent):
            match = _KEY.fullmatch(self._lines[self._next].strip())
            if match is None:
                raise self._error("is not `key: value`")
            key = match[1].strip("\"'")
            if key in found:
                raise self._error(f"has the key {key!r} a second time")
            found[key] = self._value(match[2] or "", indent)
            self._skip()
        return found

    def _list(self, indent: int) -> list[Value]:
        found: list[Value] = []
        while self._at(indent) and self._is_item():
            found.append(self._value(self._lines[self._next].strip()[1:].strip(), indent))
            self._skip()
        return found

    def _value(self, said: str, indent: int) -> Value:
        block = _BLOCK.fullmatch(said)
        if block:
            self._next += 1
            return self._block(indent, folded=block[1] == ">", chomp=block[2])
        if not said or said.startswith("#"):
            self._next += 1
            return self._nested(indent)
        if said[0] in "\"'":
            return self._quoted(said)
        if said[0] == "[":
            return self._flow_list(said)
        if said[0] in _UNSUPPORTED or said[0] in _RESERVED:
            what = _UNSUPPORTED.get(said[0], "a reserved character")
            raise self._error(f"has {what}, which is not understood here: put the value in quotes")
        return self._plain(said, indent)

    def _nested(self, indent: int) -> Value:
        self._skip()
        if self._next >= len(self._lines):
            return ""
        inner = _indent(self._lines[self._next])
        if self._is_item() and inner >= indent:
            return self._list(inner)
        return self._mapping(inner) if inner > indent else ""

    def _plain(self, said: str, indent: int) -> str:
        words = [_without_comment(said)]
        self._next += 1
        while self._next < len(self._lines):
            line = self._lines[self._next]
            if not line.strip() or _indent(line) <= indent:
                break
            words.append(_without_comment(line.strip()))
            self._next += 1
        return " ".join(filter(None, words))

    def _block(self, indent: int, *, folded: bool, chomp: str) -> str:
        start = self._next
        while self._next < len(self._lines):
            line = self._lines[self._next]
            if line.strip() and _indent(line) <= indent:
                break
            self._next += 1
        lines = self._lines[start : self._next]
        margin = min((_indent(line) for line in lines if line.strip()), default=0)
        text = "\n".join(line[margin:].rstrip() for line in lines)
        if folded:
            text = re.sub(r"(?<!\n)\n(?!\n)", " ", text.strip("\n")).replace("\n\n", "\n")
        return text if chomp == "+" else text.rstrip("\n") + ("" if chomp == "-" else "\n")

    def _quoted(self, said: str) -> str:
        quote = said[0]
        form = r'"((?:[^"\\]|\\.)*)"' if quote == '"' else r"'((?:[^']|'')*)'"
        match = re.fullmatch(form + r"\s*(?:#.*)?", said)
        if match is None:
            raise self._error("has a quote that does not end on the same line")
        if quote == "'":
            text = match[1].replace("''", "'")
        else:
            try:
                text = str(json.loads(f'"{match[1]}"'))
            except ValueError as error:
                raise self._error(f"has an escape that is not understood: {error}") from error
        self._next += 1
        return text

    def _flow_list(self, said: str) -> list[Value]:
        inner = _without_comment(said)
        if not inner.endswith("]") or re.search(r"[\[\]{}\"']", inner[1:-1]):
            raise self._error("has a list that is not understood: write one `- item` a line")
        self._next += 1
        return [item.strip() for item in inner[1:-1].split(",") if item.strip()]

    def _skip(self) -> None:
        """Go on to the next line that says something."""
        while self._next < len(self._lines):
            line = self._lines[self._next]
            if "\t" in line[: _indent(line) + 1]:
                raise self._error("is indented by a tab: use spaces")
            if line.strip() and not line.strip().startswith("#"):
                break
            self._next += 1

    def _at(self, indent: int) -> bool:
        return self._next < len(self._lines) and _indent(self._lines[self._next]) == indent

    def _is_item(self) -> bool:
        line = self._lines[self._next].strip()
        return line == "-" or line.startswith("- ")

    def _error(self, said: str) -> ValueError:
        shown = self._lines[self._next].strip()[:60]
        return ValueError(f"line {self._next + 1}: {shown!r} {said}")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _without_comment(text: str) -> str:
    return re.sub(r"\s+#.*", "", text).strip()
