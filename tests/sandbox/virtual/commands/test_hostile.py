"""Arguments that would exhaust a command are refused quickly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Run

SCRIPTS = [
    ("seq -f '%999999999f' 3", "format"),
    ("seq 1e-999999 2", "invalid floating point"),
    ("seq 1e999999", "invalid floating point"),
    ("seq $(printf '9%.0s' {1..500})", "invalid floating point"),
    ("seq -s \"$(head -c 100000 /dev/zero | tr '\\0' x)\" 1000000", "more than"),
    ("date -d \"$(yes '1 day' | head -c 100000 | tr '\\n' ' ')\"", "invalid date"),
    ("head -c 100000 /dev/zero | tr '\\0' a > l; csplit l '/a*a*b/'", "too many repeats"),
    ("echo a > l; csplit l '/\\(a*\\)*b/'", "repeated groups"),
    ("sleep 1e999999999999x", "invalid time interval"),
]


@pytest.mark.parametrize(("script", "message"), SCRIPTS)
async def test_excessive_argument_is_refused_with_a_reason(
    script: str, message: str, run: Run
) -> None:
    result = await run(script)
    assert result.exit_code == 1
    assert message in result.stderr


async def test_wide_format_stays_small(run: Run) -> None:
    result = await run("date \"+$(yes '%99999Y' | head -c 7000 | tr -d '\\n')\" | wc -c")
    assert int(result.stdout) < 1_000_000


async def test_tree_of_links_is_listed_once(run: Run) -> None:
    result = await run("mkdir d; ln -s . d/loop; ln -s ../d d/up; ls -R d; ls d/loop/loop/up")
    assert result.stdout == "d:\nloop\nup\nloop\nup\n"
