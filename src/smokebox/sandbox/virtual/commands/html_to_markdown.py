"""`html-to-markdown`: convert a page to text that a model can read."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.virtual.command import CommandOutput, describe
from smokebox.sandbox.virtual.commands.arguments import failure

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandCall

_SKIPPED = frozenset({"script", "style", "head", "noscript", "template", "svg", "iframe"})
_BLOCKS = frozenset(
    [
        *("p", "div", "section", "article", "main", "header", "footer", "nav", "aside", "form"),
        *("figure", "figcaption", "address", "dl", "dt", "dd", "fieldset", "details", "summary"),
    ]
)
_VOID = frozenset({"br", "hr", "img", "input", "meta", "link", "wbr", "area", "col", "source"})
_EMPHASIS = {"strong": "**", "b": "**", "em": "*", "i": "*", "del": "~~", "s": "~~"}
_MAX_LIST_DEPTH = 20
_MAX_SECONDS = 10.0


def html_to_markdown(call: CommandCall) -> CommandOutput:
    """Convert files, or stdin, and print Markdown."""
    if any(word.startswith("-") and word != "-" for word in call.args):
        return failure("html-to-markdown", "it takes file names only, or reads stdin", 2)
    try:
        pages = [
            call.stdin if name == "-" else call.read_file(name).decode("utf-8", "replace")
            for name in call.args or ["-"]
        ]
    except PathError as error:
        return failure("html-to-markdown", describe(error))
    return CommandOutput(stdout="".join(to_markdown(page) for page in pages))


def to_markdown(page: str) -> str:
    """Return the Markdown of a page; empty for a page without content."""
    converter = _Converter()
    converter.feed(page)
    converter.close()
    text = converter.finish()
    return f"{text}\n" if text else ""


class _Converter(HTMLParser):
    """Parser that writes Markdown for each tag."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []
        self._skipping = 0
        self._pre = 0
        self._lists: list[list[object]] = []
        self._links: list[tuple[str, int]] = []
        self._quotes: list[int] = []
        self._rows: list[list[str]] = []
        self._cell: int | None = None
        self._deadline = time.monotonic() + _MAX_SECONDS

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._check_time()
        values = {name: value or "" for name, value in attrs}
        if tag in _SKIPPED:
            self._skipping += 1
        elif self._skipping:
            return
        elif tag in _EMPHASIS:
            self._out.append(_EMPHASIS[tag])
        elif tag in _BLOCKS:
            self._block()
        else:
            self._open_tag(tag, values)

    def handle_endtag(self, tag: str) -> None:
        self._check_time()
        if tag in _SKIPPED:
            self._skipping = max(0, self._skipping - 1)
        elif self._skipping:
            return
        elif tag in _EMPHASIS:
            self._close_emphasis(_EMPHASIS[tag])
        elif tag in _BLOCKS or re.fullmatch(r"h[1-6]", tag):
            self._block()
        else:
            self._close_tag(tag)

    def handle_data(self, data: str) -> None:
        self._check_time()
        if self._skipping:
            return
        if self._pre:
            self._out.append(data)
            return
        text = re.sub(r"\s+", " ", data)
        if text.startswith(" ") and (not self._out or self._out[-1].endswith(("\n", " "))):
            text = text[1:]
        if text:
            self._out.append(text)

    def _check_time(self) -> None:
        # The parser rescans a page of broken tags repeatedly.
        if time.monotonic() > self._deadline:
            raise TimeoutError("the page takes too long to read")

    def _open_tag(self, tag: str, values: dict[str, str]) -> None:
        if re.fullmatch(r"h[1-6]", tag):
            self._block()
            self._out.append("#" * int(tag[1]) + " ")
        elif tag == "br":
            self._out.append("  \n")
        elif tag == "hr":
            self._block()
            self._out.append("---")
            self._block()
        elif tag == "img":
            self._out.append(f"![{values.get('alt', '')}]({values.get('src', '')})")
        elif tag == "a":
            self._links.append((values.get("href", ""), len(self._out)))
        elif tag in ("ul", "ol"):
            self._open_list(tag, values)
        elif tag == "li":
            self._item()
        elif tag == "pre":
            self._block()
            self._out.append("```\n")
            self._pre += 1
        elif tag == "code" and not self._pre:
            self._out.append("`")
        elif tag == "blockquote":
            self._block()
            self._quotes.append(len(self._out))
        elif tag in ("table", "tr", "td", "th"):
            self._open_table(tag)

    def _close_tag(self, tag: str) -> None:
        if tag == "a" and self._links:
            href, start = self._links.pop()
            text = "".join(self._out[start:]).strip()
            self._out[start:] = [f"[{text}]({href})" if href and text else text]
        elif tag in ("ul", "ol") and self._lists:
            self._lists.pop()
            if not self._lists:
                self._block()
        elif tag == "pre" and self._pre:
            self._pre -= 1
            if not "".join(self._out[-2:]).endswith("\n"):
                self._out.append("\n")
            self._out.append("```")
            self._block()
        elif tag == "code" and not self._pre:
            self._out.append("`")
        elif tag == "blockquote" and self._quotes:
            start = self._quotes.pop()
            quoted = _tidy("".join(self._out[start:]))
            self._out[start:] = ["\n".join(f"> {line}".rstrip() for line in quoted.split("\n"))]
            self._block()
        elif tag in ("table", "tr", "td", "th"):
            self._close_table(tag)

    def _open_list(self, tag: str, values: dict[str, str]) -> None:
        if not self._lists:
            self._block()
        start = values.get("start", "1")
        first = int(start) if start.isdigit() and len(start) < 10 else 1
        self._lists.append([tag, first])

    def _item(self) -> None:
        if self._out and not self._out[-1].endswith("\n"):
            self._out.append("\n")
        kind, number = self._lists[-1] if self._lists else ("ul", 1)
        if self._lists:
            self._lists[-1][1] = int(str(number)) + 1
        depth = min(max(0, len(self._lists) - 1), _MAX_LIST_DEPTH)
        self._out.append("  " * depth + (f"{number}. " if kind == "ol" else "- "))

    def _close_emphasis(self, mark: str) -> None:
        # `** bold **` is not bold: the space moves outside.
        if self._out and self._out[-1] == mark:
            self._out.pop()
            return
        last = self._out[-1] if self._out else ""
        if last.endswith(" "):
            self._out[-1] = last.rstrip(" ")
            self._out.append(f"{mark} ")
        else:
            self._out.append(mark)

    def _open_table(self, tag: str) -> None:
        if tag == "table":
            self._block()
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        else:
            self._close_table(tag)
            self._cell = len(self._out)

    def _close_table(self, tag: str) -> None:
        if tag in ("td", "th", "tr", "table") and self._cell is not None:
            text = " ".join("".join(self._out[self._cell :]).split()).replace("|", "\\|")
            del self._out[self._cell :]
            self._cell = None
            if not self._rows:
                self._rows.append([])
            self._rows[-1].append(text)
        if tag == "table":
            rows = [row for row in self._rows if row]
            if rows:
                lines = [f"| {' | '.join(row)} |" for row in rows]
                lines.insert(1, "|" + " --- |" * len(rows[0]))
                self._out.append("\n".join(lines))
            self._rows = []
            self._block()

    def _block(self) -> None:
        """End the current paragraph."""
        if self._lists or self._cell is not None:
            if self._out and not self._out[-1].endswith((" ", "\n")):
                self._out.append(" ")
        elif self._out:
            self._out.append("\n\n")

    def finish(self) -> str:
        """Return the text, with at most one blank line between paragraphs."""
        return _tidy("".join(self._out))


def _tidy(text: str) -> str:
    text = re.sub(r"[ \t]+\n(?=\n)", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
