"""Tests of parsing the output of grep and ripgrep."""

from __future__ import annotations

import pytest

from smokebox.agents.tools.grep import MAX_COUNTED, MAX_MATCHES, Hit, HitParser


def parse(*chunks: str, include: str | None = None, plain: bool = False) -> list[Hit]:
    parser = HitParser("/w", include=include, skipped=[".git"], plain=plain)
    for chunk in chunks:
        assert parser.feed(chunk)
    return parser.finish()


def test_match_with_context_lines() -> None:
    found = parse("/w/a\x001-before\n/w/a\x002:match\n--\n/w/a\x009:other\r\n")
    assert found == [
        Hit("/w/a", 1, False, "before"),
        Hit("/w/a", 2, True, "match"),
        Hit("/w/a", 9, True, "other"),
    ]


def test_chunks_may_be_split_anywhere() -> None:
    text = "/w/a\nb\x0012:x:1:y\n/w/c\x003:z\n"
    assert parse(*text) == [Hit("/w/a\nb", 12, True, "x:1:y"), Hit("/w/c", 3, True, "z")]


def test_last_line_without_newline_counts() -> None:
    assert parse("/w/a\x001:end") == [Hit("/w/a", 1, True, "end")]


def test_very_long_line_is_truncated() -> None:
    found = parse("/w/a\x001:", *["x" * 50_000] * 40, "\n/w/b\x002:next\n")
    assert [(hit.path, len(hit.text)) for hit in found] == [("/w/a", 503), ("/w/b", 4)]


@pytest.mark.parametrize(
    "noise",
    [
        "/w/bin\x00binary file matches (found NUL)\n",
        "/w/bin: binary file matches (found NUL)\n",
        "/w/bin: WARNING: stopped searching binary file after match (found NUL)\n",
    ],
)
def test_notices_about_binary_files_are_skipped(noise: str) -> None:
    assert parse(noise + "/w/a\x001:x\n" + noise) == [Hit("/w/a", 1, True, "x")]


def test_hits_are_sorted_by_path_and_line() -> None:
    found = parse("/w/b\x002:x\n/w/a\x0010:x\n/w/a\x009:x\n")
    assert [(hit.path, hit.line) for hit in found] == [("/w/a", 9), ("/w/a", 10), ("/w/b", 2)]


def test_first_matches_are_kept_in_any_order() -> None:
    found = parse(*(f"/w/f{n:05}\x001:x\n" for n in reversed(range(9000))))
    assert [hit.path for hit in found] == [f"/w/f{n:05}" for n in range(MAX_MATCHES)]


def test_too_many_matches_stop_the_search() -> None:
    parser = HitParser("/w", include=None, skipped=[], plain=False)
    assert not parser.feed("/w/a\x001:x\n" * (MAX_COUNTED + 5))
    assert parser.count == MAX_COUNTED + 1


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("*.py", ["/w/a.py", "/w/src/b.py"]),
        ("src/*.py", ["/w/src/b.py"]),
        ("*.{py,md}", ["/w/a.py", "/w/c.md", "/w/src/b.py"]),
        ("!*.py", ["/w/c.md"]),
    ],
)
def test_include_filters_files(include: str, expected: list[str]) -> None:
    names = ["/w/a.py", "/w/src/b.py", "/w/c.md", "/w/.git/d.py"]
    found = parse(*(f"{name}\x001:x\n" for name in names), include=include)
    assert [hit.path for hit in found] == expected


def test_output_without_nul_is_parsed() -> None:
    found = parse("/w/a:1:x:y\n/w/a-2-z\n--\n/w/.git/b:1:x\n", plain=True)
    assert found == [Hit("/w/a", 1, True, "x:y"), Hit("/w/a", 2, False, "z")]
