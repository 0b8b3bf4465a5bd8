"""Paths that a pattern matches, over a small tree in a dictionary."""

from __future__ import annotations

import time

import pytest

from smokebox.errors import InvalidOption, InvalidPath, PathNotFound, ServiceUnavailable
from smokebox.sandbox.glob import GlobEntry, expand_braces, glob_paths

TREE: dict[str, list[GlobEntry]] = {
    "/": [GlobEntry("work", "directory"), GlobEntry("etc", "directory")],
    "/etc": [GlobEntry("passwd", "file")],
    "/work": [
        GlobEntry("a.py", "file"),
        GlobEntry("b.txt", "file"),
        GlobEntry(".env", "file"),
        GlobEntry("src", "directory"),
        GlobEntry(".git", "directory"),
        GlobEntry("link", "directory", is_symlink=True),
        GlobEntry("dangling", "symlink", is_symlink=True),
        GlobEntry("alias.py", "file", is_symlink=True),
        GlobEntry("[x]*", "file"),
    ],
    "/work/src": [
        GlobEntry("c.py", "file"),
        GlobEntry("d.ts", "file"),
        GlobEntry("e.tsx", "file"),
        GlobEntry("deep", "directory"),
    ],
    "/work/src/deep": [GlobEntry("f.py", "file"), GlobEntry(".g.py", "file")],
    "/work/link": [GlobEntry("c.py", "file"), GlobEntry("deep", "directory")],
    "/work/link/deep": [GlobEntry("f.py", "file")],
    "/work/.git": [GlobEntry("config", "file"), GlobEntry("hook.py", "file")],
}


def glob(pattern: str, *, hidden: bool = False, files_only: bool = False) -> list[str]:
    """Return the matches from /work, without that prefix."""

    def listed(path: str) -> list[GlobEntry]:
        if path not in TREE:
            raise PathNotFound(path)
        return TREE[path]

    found = glob_paths(pattern, "/work", listed, hidden=hidden, files_only=files_only)
    return [path.removeprefix("/work/") for path in found]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*.py", ["a.py", "alias.py"]),
        ("?.py", ["a.py"]),
        ("[ab].*", ["a.py", "b.txt"]),
        ("[!a].*", ["b.txt"]),
        ("[^a].*", ["b.txt"]),
        ("a.py", ["a.py"]),
        ("nothing", []),
        ("nothing/*.py", []),
        ("a.py/*", []),
        ("*/c.py", ["link/c.py", "src/c.py"]),
        ("src/deep/f.py", ["src/deep/f.py"]),
        ("./src/./c.py", ["src/c.py"]),
        ("src/../a.py", ["a.py"]),
        ("../etc/*", ["/etc/passwd"]),
        ("../../../etc/passwd", ["/etc/passwd"]),
        ("/etc/*", ["/etc/passwd"]),
        ("/", ["/"]),
        ("..", ["/"]),
        (".", ["/work"]),
        ("/work", ["/work"]),
        ("d*", ["dangling"]),
        ("dangling", ["dangling"]),
        ("dangling/*", []),
    ],
)
def test_names(pattern: str, matches: list[str]) -> None:
    assert glob(pattern) == matches


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("**/*.py", ["a.py", "alias.py", "src/c.py", "src/deep/f.py"]),
        ("src/**", ["src/c.py", "src/d.ts", "src/deep", "src/deep/f.py", "src/e.tsx"]),
        ("**/deep/*.py", ["src/deep/f.py"]),
        ("**/**/**/f.py", ["src/deep/f.py"]),
        ("src/**/c.py", ["src/c.py"]),
        ("link/**/*.py", ["link/c.py", "link/deep/f.py"]),
        ("**/deep", ["src/deep"]),
        ("s**/c.py", ["src/c.py"]),
    ],
)
def test_two_stars_cross_directories_but_not_symlinks(pattern: str, matches: list[str]) -> None:
    assert glob(pattern) == matches


@pytest.mark.parametrize(
    ("pattern", "hidden", "matches"),
    [
        (".*", False, [".env", ".git"]),
        (".e*", False, [".env"]),
        ("[.]env", False, []),
        ("**/config", False, []),
        (".git/*", False, [".git/config", ".git/hook.py"]),
        ("**/config", True, [".git/config"]),
        ("src/deep/*", True, ["src/deep/.g.py", "src/deep/f.py"]),
        ("?git", True, [".git"]),
    ],
)
def test_dotfiles_are_skipped_unless_requested(
    pattern: str, hidden: bool, matches: list[str]
) -> None:
    assert glob(pattern, hidden=hidden) == matches


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("**/*.{ts,tsx}", ["src/d.ts", "src/e.tsx"]),
        ("{a,b}.{py,txt}", ["a.py", "b.txt"]),
        ("{src/deep,.git}/*", [".git/config", ".git/hook.py", "src/deep/f.py"]),
        ("{a,{b,z}}.*", ["a.py", "b.txt"]),
        ("{a.py,/etc/*}", ["/etc/passwd", "a.py"]),
        ("{a}.py", []),
        ("a{,lias}.py", ["a.py", "alias.py"]),
        ("{a.py", []),
    ],
)
def test_braces_are_alternatives(pattern: str, matches: list[str]) -> None:
    assert glob(pattern) == matches


def test_backslash_quotes_wildcards() -> None:
    assert glob(r"\[x\]\*") == ["[x]*"]
    assert glob(r"\[x]*") == ["[x]*"]
    assert glob(r"\{a,b\}.py") == []
    assert glob(r"\a.py") == ["a.py"]


def test_unclosed_bracket_is_literal() -> None:
    assert glob("[x*") == ["[x]*"]
    assert glob("[[]*") == ["[x]*"]
    assert glob("[a*") == []


def test_files_only_excludes_other_kinds() -> None:
    assert glob("*", files_only=True) == ["[x]*", "a.py", "alias.py", "b.txt"]
    assert glob(".", files_only=True) == []


def test_final_slash_matches_directories_only() -> None:
    assert glob("*/") == ["link", "src"]
    assert glob("src/**/") == ["src/deep"]
    assert glob("*/", files_only=True) == []


def test_each_path_is_returned_once() -> None:
    assert glob("{a,*}.py") == ["a.py", "alias.py"]


def test_invalid_path_is_refused() -> None:
    for pattern in ("", "a\0b", "\ud800"):
        with pytest.raises(InvalidPath):
            glob(pattern)


def test_too_many_alternatives_are_refused() -> None:
    with pytest.raises(InvalidOption, match="alternatives"):
        glob("{a,b}" * 40)


def test_connection_error_while_listing_is_raised() -> None:
    def listed(path: str) -> list[GlobEntry]:
        raise ServiceUnavailable("the store did not respond.")

    with pytest.raises(ServiceUnavailable):
        glob_paths("*", "/", listed)


def test_only_directories_that_can_match_are_listed() -> None:
    paths: list[str] = []

    def listed(path: str) -> list[GlobEntry]:
        paths.append(path)
        return TREE.get(path, [])

    glob_paths("src/deep/*.py", "/work", listed)
    assert paths == ["/work/src/deep"]


def test_ten_thousand_files_are_matched_quickly() -> None:
    tree = {"/": [GlobEntry(f"d{n}", "directory") for n in range(100)]}
    for n in range(100):
        tree[f"/d{n}"] = [GlobEntry(f"file{m}.py", "file") for m in range(100)]
    started = time.monotonic()
    assert len(glob_paths("**/*.{py,ts,js}", "/", tree.__getitem__)) == 10_000
    assert time.monotonic() - started < 10


def test_many_stars_do_not_backtrack() -> None:
    tree = {"/": [GlobEntry("a" * 250, "file")]}
    started = time.monotonic()
    assert glob_paths("*a" * 60 + "b", "/", tree.__getitem__) == []
    assert glob_paths("**/" * 40 + "x", "/", tree.__getitem__) == []
    assert time.monotonic() - started < 10


def test_deep_directories_are_walked() -> None:
    def listed(path: str) -> list[GlobEntry]:
        return [GlobEntry("d", "directory")] if len(path) < 6000 else [GlobEntry("a.py", "file")]

    assert len(glob_paths("**/*.py", "/", listed)) == 1


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


def test_brace_bomb_is_refused() -> None:
    with pytest.raises(InvalidOption):
        expand_braces("{a,b}" * 40)
