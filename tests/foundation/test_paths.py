"""Path rules: resolving, checking and parents of paths as text."""

from __future__ import annotations

from typing import cast

import pytest

from smokebox.errors import InvalidPath
from smokebox.foundation.paths import check_path, parents, resolve


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a", "/work/a"),
        (".", "/work"),
        ("..", "/"),
        ("../../..", "/"),
        ("./a/../b//c/", "/work/b/c"),
        ("/etc", "/etc"),
        ("//etc", "/etc"),
        ("///etc", "/etc"),
        ("/", "/"),
        ("~", "/work/~"),
        ("a\nb", "/work/a\nb"),
    ],
)
def test_path_is_resolved_against_the_cwd(path: str, expected: str) -> None:
    assert resolve(path, "/work") == expected


@pytest.mark.parametrize("path", ["", "a\0", "\udcff", cast("str", b"a"), cast("str", None)])
def test_invalid_path_is_refused_with_a_hint(path: str) -> None:
    with pytest.raises(InvalidPath) as caught:
        check_path(path)
    assert caught.value.hint


def test_parents_are_outermost_first() -> None:
    assert parents("/a/b/c") == ["/a", "/a/b"]
    assert parents("/a") == []
    assert parents("/") == []
