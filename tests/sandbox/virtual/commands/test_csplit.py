"""`csplit` splits as GNU csplit does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare

SCRIPTS = [
    'csplit h.txt /foo/; cat xx00; echo -; cat xx01', 'csplit -s h.txt /foo/; ls xx*',
    'seq 20 > s; csplit -s s 5 10; wc -l xx*', "seq 20 > s; csplit s '/5/' '{1}'; cat xx02",
    "seq 20 > s; csplit s '/5/' '{*}'; ls xx*", 'seq 20 > s; csplit -f p_ -n 3 s 7; ls p_*',
    "seq 20 > s; csplit -b '%02d.txt' s 7; ls xx*",
    "seq 20 > s; csplit s '%5%'; cat xx00 | head -1",
    "seq 20 > s; csplit s '/5/+2'; cat xx00 | tail -1",
    "seq 20 > s; csplit s '/5/-2'; cat xx00 | tail -1",
    'seq 20 > s; csplit s /zz/; echo $?; ls xx* 2>/dev/null',
    'seq 20 > s; csplit -k s /zz/; echo $?; ls xx* 2>/dev/null',
    'seq 20 > s; csplit s 99; echo $?',
    'seq 20 > s; csplit --suppress-matched -s s 5 10; wc -l xx*',
    "seq 20 > s; csplit s 5 '{*}'; echo $?", "seq 20 > s; csplit s 5 '{2}'; echo $?",
    r"printf 'a\n---\nb\n---\nc\n' > s; csplit -z s '/^---$/' '{*}'; cat xx01",
    r"printf 'a\n---\nb\n---\nc\n' > s; csplit --suppress-matched -sz s '/^---$/' '{*}'; cat xx01",
    'cat h.txt | csplit - /foo/', 'csplit nothere 1; echo $?',
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_csplit_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)
