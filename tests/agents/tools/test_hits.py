"""What grep and ripgrep write is read in pieces, whatever is in it."""

from __future__ import annotations

import pytest

from smokebox.agents.tools.grep import MAX_COUNTED, MAX_MATCHES, Hit, Hits


def read(*pieces: str, include: str | None = None, plain: bool = False) -> list[Hit]:
    hits = Hits("/w", include=include, skipped=[".git"], plain=plain)
    for piece in pieces:
        assert hits.feed(piece)
    return hits.first()


def test_a_match_and_its_context() -> None:
    found = read("/w/a\x001-before\n/w/a\x002:match\n--\n/w/a\x009:other\r\n")
    assert found == [
        Hit("/w/a", 1, False, "before"),
        Hit("/w/a", 2, True, "match"),
        Hit("/w/a", 9, True, "other"),
    ]


def test_pieces_may_be_cut_anywhere() -> None:
    text = "/w/a\nb\x0012:x:1:y\n/w/c\x003:z\n"
    assert read(*text) == [Hit("/w/a\nb", 12, True, "x:1:y"), Hit("/w/c", 3, True, "z")]


def test_a_last_line_without_its_break_counts() -> None:
    assert read("/w/a\x001:end") == [Hit("/w/a", 1, True, "end")]


def test_a_vast_line_is_cut_and_the_next_is_found() -> None:
    found = read("/w/a\x001:", *["x" * 50_000] * 40, "\n/w/b\x002:next\n")
    assert [(hit.path, len(hit.text)) for hit in found] == [("/w/a", 503), ("/w/b", 4)]


@pytest.mark.parametrize(
    "noise",
    [
        "/w/bin\x00binary file matches (found NUL)\n",
        "/w/bin: binary file matches (found NUL)\n",
        "/w/bin: WARNING: stopped searching binary file after match (found NUL)\n",
    ],
)
def test_remarks_about_binary_files_are_no_matches(noise: str) -> None:
    assert read(noise + "/w/a\x001:x\n" + noise) == [Hit("/w/a", 1, True, "x")]


def test_hits_come_in_order_of_path_and_line() -> None:
    found = read("/w/b\x002:x\n/w/a\x0010:x\n/w/a\x009:x\n")
    assert [(hit.path, hit.line) for hit in found] == [("/w/a", 9), ("/w/a", 10), ("/w/b", 2)]


def test_the_first_matches_are_kept_however_late_they_come() -> None:
    found = read(*(f"/w/f{n:05}\x001:x\n" for n in reversed(range(9000))))
    assert [hit.path for hit in found] == [f"/w/f{n:05}" for n in range(MAX_MATCHES)]


def test_a_flood_is_stopped() -> None:
    hits = Hits("/w", include=None, skipped=[], plain=False)
    assert not hits.feed("/w/a\x001:x\n" * (MAX_COUNTED + 5))
    assert hits.count == MAX_COUNTED + 1


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("*.py", ["/w/a.py", "/w/src/b.py"]),
        ("src/*.py", ["/w/src/b.py"]),
        ("*.{py,md}", ["/w/a.py", "/w/c.md", "/w/src/b.py"]),
        ("!*.py", ["/w/c.md"]),
    ],
)
def test_include_chooses_files(include: str, expected: list[str]) -> None:
    names = ["/w/a.py", "/w/src/b.py", "/w/c.md", "/w/.git/d.py"]
    found = read(*(f"{name}\x001:x\n" for name in names), include=include)
    assert [hit.path for hit in found] == expected


def test_a_grep_without_nul_is_understood() -> None:
    found = read("/w/a:1:x:y\n/w/a-2-z\n--\n/w/.git/b:1:x\n", plain=True)
    assert found == [Hit("/w/a", 1, True, "x:y"), Hit("/w/a", 2, False, "z")]
