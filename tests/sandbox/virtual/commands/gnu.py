"""The small tree that tests of commands run over, and their shared types."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.types import ExecResult

Run = Callable[[str], Awaitable["ExecResult"]]
Compare = Callable[[str], Awaitable[None]]

TREE = r"""
mkdir -p src/sub empty
printf 'b\na\nc\na\n' > f.txt; printf 'hello world\nfoo bar\nbaz\n' > h.txt
printf 'def a():\n    return 1\n' > src/a.py; printf 'import a\n' > src/sub/b.py
touch .hid; ln -s f.txt lnk; chmod 755 src/a.py
printf 'a\nB\nc\n' > p1; printf 'a\nb\nc\nd\n' > p2
"""
