"""`html-to-markdown`: conversion, input and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.sandbox.virtual.commands.html_to_markdown import to_markdown

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Run

PAGES = [
    ("<h1>Title</h1><p>Some <b>bold</b> and <em>soft</em> text.</p>",
     "# Title\n\nSome **bold** and *soft* text.\n"),
    ("<ul><li>one</li><li>two<ul><li>deep</li></ul></li></ul>", "- one\n- two\n  - deep\n"),
    ("<ol start=3><li>c</li><li>d</li></ol>", "3. c\n4. d\n"),
    ("<a href='/x'>link</a> <a>bare</a>", "[link](/x) bare\n"),
    ("<img src=a.png alt=pic>", "![pic](a.png)\n"),
    ("<pre>a\n  b</pre>", "```\na\n  b\n```\n"),
    ("<p>use <code>ls -l</code></p>", "use `ls -l`\n"),
    ("<blockquote><p>said</p><p>twice</p></blockquote>", "> said\n>\n> twice\n"),
    ("<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>x|y</td></tr></table>",
     "| a | b |\n| --- | --- |\n| 1 | x\\|y |\n"),
    ("<head><title>no</title></head><script>no()</script><p>yes</p><style>no</style>", "yes\n"),
    ("a &amp; b &lt;c&gt;", "a & b <c>\n"),
    ("line<br>break", "line  \nbreak\n"),
    ("<p>a</p><hr><p>b</p>", "a\n\n---\n\nb\n"),
    ("", ""),
    ("<b>unclosed <i>tags", "**unclosed *tags\n"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "text"), PAGES)
def test_page_is_converted_to_markdown(page: str, text: str) -> None:
    assert to_markdown(page) == text


async def test_files_and_stdin_are_read(run: Run) -> None:
    result = await run(
        "echo '<h2>f</h2>' > f.html; html-to-markdown f.html; echo '<i>s</i>' | html-to-markdown"
    )
    assert result.stdout == "## f\n*s*\n"


async def test_missing_file_is_an_error(run: Run) -> None:
    result = await run("html-to-markdown nothere")
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr


def test_thousands_of_open_tags_are_converted() -> None:
    page = "<div>" * 5000 + "<ul>" * 1000 + "<li>x" + "<blockquote>" * 100 + "y"
    assert "x" in to_markdown(page)
