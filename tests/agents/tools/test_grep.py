"""Tests of the grep tool."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from smokebox import local
from smokebox.agents.tools import grep_tool
from smokebox.agents.tools.grep import GrepQuery, SearchProgram, find_search_program, search

if TYPE_CHECKING:
    from pathlib import Path

    from agents.tools.workspace import Workspace


async def test_matches_have_path_and_line(work: Workspace) -> None:
    await work.put(b="x\nhello world\n", a="hello\n")
    assert await work.text("grep", pattern=r"hel+o( \w+)?") == "a:1:hello\nb:2:hello world"


async def test_paths_are_formatted_like_the_argument(work: Workspace) -> None:
    await work.sandbox.write_file("d/e/f", "x\n")
    assert await work.text("grep", pattern="x", path="d") == "d/e/f:1:x"
    assert await work.text("grep", pattern="x", path="./d/e/") == "d/e/f:1:x"
    assert await work.text("grep", pattern="x", path="d/e/f") == "d/e/f:1:x"
    full = work.sandbox.resolve_path("d")
    assert await work.text("grep", pattern="x", path=full) == f"{full}/e/f:1:x"


async def test_no_match_is_reported(work: Workspace) -> None:
    await work.put(a="hello\n")
    assert await work.text("grep", pattern="zzz") == "No matches found."


async def test_invalid_expression_is_an_error(work: Workspace) -> None:
    await work.put(a="hello\n")
    error = (await work.error("grep", pattern="(")).lower()
    assert "paren" in error or "group" in error


async def test_missing_path_is_an_error(work: Workspace) -> None:
    assert "no such file or directory" in await work.error("grep", pattern="x", path="none")


@pytest.mark.parametrize("pattern", ["(a+b)*", "$HOME", "`id`", "it's", '"', "--", "-e", "\\d["])
async def test_literal_pattern_is_plain_text(work: Workspace, pattern: str) -> None:
    await work.put(a=f"one {pattern} two\n", b="one two\n")
    text = await work.text("grep", pattern=pattern, literal=True)
    assert text == f"a:1:one {pattern} two"


@pytest.mark.parametrize("pattern", ["--", "-e", "--help", "-f/etc/passwd", r"it's \$\(id\)"])
async def test_pattern_is_never_an_option_or_shell_text(work: Workspace, pattern: str) -> None:
    await work.put(a="-- -e --help -f/etc/passwd it's $(id)\n")
    assert (await work.text("grep", pattern=pattern)).startswith("a:1:-- -e")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d{3}", True),
        (r"\bfoo\b", True),
        (r"f(?:o|x)+", True),
        (r"\s\S+?$", True),
        ("^123", False),
    ],
)
async def test_common_expressions_match(work: Workspace, pattern: str, expected: bool) -> None:
    await work.put(a="foo 123\n")
    assert (await work.text("grep", pattern=pattern) == "a:1:foo 123") is expected


async def test_ignore_case(work: Workspace) -> None:
    await work.put(a="HÉLLO\n")
    assert await work.text("grep", pattern="héllo") == "No matches found."
    assert await work.text("grep", pattern="héllo", ignore_case=True) == "a:1:HÉLLO"


async def test_context_lines_are_shown(work: Workspace) -> None:
    await work.put(a="1\n2\nx\n4\n5\n6\n7\nx\n")
    text = await work.text("grep", pattern="x", context=1)
    assert text == "a-2-2\na:3:x\na-4-4\n--\na-7-7\na:8:x"


@pytest.mark.parametrize("include", ["*.py", "src/**", "*.{py,rs}", "**/*.py", "!*.md"])
async def test_include_filters_files(work: Workspace, include: str) -> None:
    await work.sandbox.write_file("src/deep/a.py", "x\n")
    await work.sandbox.write_file("b.md", "x\n")
    assert await work.text("grep", pattern="x", include=include) == "src/deep/a.py:1:x"


@pytest.mark.parametrize("include", ["[", "$(id)", "a'b", "!", "-x", "\\"])
async def test_odd_include_matches_nothing(work: Workspace, include: str) -> None:
    await work.put(a="x\n")
    assert await work.text("grep", pattern="x", include=include) in ("No matches found.", "a:1:x")


async def test_binary_files_are_skipped(work: Workspace) -> None:
    await work.put(a=b"\0\1\2hello\n", b="hello\n")
    assert await work.text("grep", pattern="hello") == "b:1:hello"
    assert await work.text("grep", pattern="hello", path="a") == "No matches found."


async def test_lines_with_invalid_utf8_match(host: Workspace) -> None:
    await host.put(a=b"caf\xe9 hello\n")
    assert await host.text("grep", pattern="hello") == "a:1:caf\ufffd hello"


async def test_hidden_files_are_searched_but_not_git_or_node_modules(work: Workspace) -> None:
    for name in (".env", ".github/ci", ".git/config", "node_modules/p/i.js", "a/node_modules/x"):
        await work.sandbox.write_file(name, "hello\n")
    assert await work.text("grep", pattern="hello") == ".env:1:hello\n.github/ci:1:hello"


@pytest.mark.parametrize("path", ["node_modules", "node_modules/p", ".git"])
async def test_skipped_directory_can_be_searched_by_path(work: Workspace, path: str) -> None:
    await work.sandbox.write_file("node_modules/p/i.js", "hello\n")
    await work.sandbox.write_file(".git/config", "hello\n")
    assert ":1:hello" in await work.text("grep", pattern="hello", path=path)


async def test_at_most_100_matches_are_shown(work: Workspace) -> None:
    await work.put(a="x\n" * 250)
    text = await work.text("grep", pattern="x")
    assert text.count("a:") == 100
    assert text.endswith("\n\n[Showing 100 of 250 matches. Narrow the pattern or path.]")


async def test_search_stops_after_too_many_matches(work: Workspace) -> None:
    await work.put(a="x\n" * 30_000)
    text = await work.text("grep", pattern="x")
    assert text.endswith("[Showing 100 of more than 10000 matches. Narrow the pattern or path.]")


async def test_long_lines_are_cut_by_bytes(work: Workspace) -> None:
    await work.put(a="é" * 300 + "\n", b="x" * 2_000_000 + "é\n")
    text = await work.text("grep", pattern="é")
    assert text == f"a:1:{'é' * 250}...\nb:1:{'x' * 500}..."


async def test_result_is_limited_in_bytes(work: Workspace) -> None:
    await work.put(a=("x\n" + ("y" * 600 + "\n") * 5) * 99)
    text = await work.text("grep", pattern="x", context=5)
    assert len(text) < 51200 + 100
    assert "of 99 matches" in text


@pytest.mark.parametrize("pattern", ["a\nb", "a\0b", "x" * 70_000])
async def test_unsupported_pattern_is_an_error(work: Workspace, pattern: str) -> None:
    assert (await work.error("grep", pattern=pattern)).startswith("pattern h")


async def test_path_with_line_break_is_quoted(host: Workspace, tmp_path: Path) -> None:
    (tmp_path / "a\nb").write_text("hello\n")
    (tmp_path / "-").write_text("hello\n")
    assert await host.text("grep", pattern="hello") == '-:1:hello\n"a\\nb":1:hello'
    assert await host.text("grep", pattern="hello", path="-") == "-:1:hello"


async def test_fifo_is_refused(host: Workspace, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    await host.put(a="hello\n")
    async with asyncio.timeout(10):
        assert "neither a file" in await host.error("grep", pattern="x", path="pipe")
        assert await host.text("grep", pattern="hello") == "a:1:hello"


async def test_sandbox_without_grep_is_an_error(tmp_path: Path) -> None:
    async with local(cwd=tmp_path, env={"PATH": str(tmp_path)}) as sandbox:
        result = await grep_tool(sandbox).run({"pattern": "x"})
    assert result.is_error
    assert "not found" in result.text


@pytest.mark.parametrize("engine", ["pcre", "ere", "plain"])
async def test_all_programs_find_the_same(host: Workspace, engine: SearchProgram) -> None:
    await host.put(a__py="one\nhello\nthree\n", b="hello\n")
    await host.sandbox.write_file(".git/c.py", "hello\n")
    root = host.sandbox.resolve_path(".")
    query = GrepQuery(pattern="hel+o", root=root, include="*.py", ignore_case=True, context=1)
    found = await search(host.sandbox, engine, query)
    assert [(hit.line, hit.text) for hit in found.hits] == [(1, "one"), (2, "hello"), (3, "three")]


async def test_search_program_is_detected(host: Workspace, tmp_path: Path) -> None:
    assert await find_search_program(host.sandbox) in ("rg", "pcre", "ere")
    rg = tmp_path / "bin" / "rg"
    rg.parent.mkdir()
    rg.write_text("#!/bin/sh\necho ripgrep\n")
    rg.chmod(0o755)
    path = f"{rg.parent}{os.pathsep}{os.environ['PATH']}"
    async with local(cwd=tmp_path, env={"PATH": path}) as sandbox:
        assert await find_search_program(sandbox) == "rg"
