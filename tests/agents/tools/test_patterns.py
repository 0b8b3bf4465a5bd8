"""Globs as models write them."""

from __future__ import annotations

import pytest

from smokebox.agents.tools.patterns import MAX_EXPANSIONS, expand_braces, matches


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", ["*.py"]),
        ("*.{ts,tsx}", ["*.ts", "*.tsx"]),
        ("{a,b}/{c,d}", ["a/c", "b/c", "a/d", "b/d"]),
        ("a{,.bak}", ["a", "a.bak"]),
        ("{a,{b,c}}", ["a", "b", "c"]),
        ("{x}", ["{x}"]),
        ("{", ["{"]),
    ],
)
def test_braces(pattern: str, expected: list[str]) -> None:
    assert sorted(expand_braces(pattern)) == sorted(expected)


def test_a_bomb_of_braces_is_bounded() -> None:
    assert len(expand_braces("{a,b}" * 40)) <= 2 * MAX_EXPANSIONS


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.py", "a.py", True),
        ("*.py", "src/deep/a.py", True),
        ("*.py", "a.pyc", False),
        ("*", ".env", True),
        ("src/*.py", "src/a.py", True),
        ("src/*.py", "src/deep/a.py", False),
        ("./src/*.py", "src/a.py", True),
        ("src/**/*.py", "src/a.py", True),
        ("src/**/*.py", "src/x/y/a.py", True),
        ("**/test_*", "tests/test_a.py", True),
        ("**/**/a", "a", True),
        ("src/", "src/x/a", True),
        ("src/**", "lib/a", False),
        ("[ab].txt", "a.txt", True),
        ("[!ab].txt", "a.txt", False),
        ("A.txt", "a.txt", False),
    ],
)
def test_matches(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected
