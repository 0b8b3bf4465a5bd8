"""`diff` prints what GNU diff prints."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare, Run

SCRIPTS = [
    'diff p1 p2', 'diff -u p1 p2 | tail -n +3', 'diff -c p1 p2 | tail -n +3',
    'diff -u p1 p2 | head -2 | cut -f1', "touch -d '2024-01-05 10:00:00' p1 p2; diff -u p1 p2",
    "touch -d '2024-01-05 10:00:00' p1 p2; diff -c p1 p2", 'diff -q p1 p2', 'diff --brief p1 p2',
    'diff p1 p1; echo $?', 'diff -s p1 p1', 'diff p1 nothere; echo $?',
    'diff nothere nothere2; echo $?', 'diff -i p1 p2', 'diff -w p1 p2',
    r"printf 'a  b\n\nc\n' > x; printf 'a b \nc\n' > y; diff -b x y",
    r"printf 'a  b\n\nc\n' > x; printf 'a b \nc\n' > y; diff -w x y",
    r"printf 'a  b\n\nc\n' > x; printf 'a b \nc\n' > y; diff -wB x y; echo $?",
    r"printf 'a  b\n\nc\n' > x; printf 'a b \nc\n' > y; diff -B x y",
    'diff -u /dev/null p1 | tail -n +2 | cut -f1', 'diff p1 /dev/null',
    'diff <(echo a) <(echo b)', 'diff <(echo a) p1', 'echo b | diff - p1', 'echo b | diff p1 -',
    r"printf 'a' > x; printf 'a\n' > y; diff x y",
    r"printf 'a' > x; printf 'a\n' > y; diff -u x y | tail -n +3",
    "printf 'a' > x; printf 'b' > y; diff x y; diff -c x y | tail -n +3",
    'cp -r src s2; diff -r src s2; echo $?',
    'cp -r src s2; echo x >> s2/a.py; touch s2/new; rm s2/sub/b.py; diff -r src s2; echo $?',
    'cp -r src s2; echo x >> s2/a.py; touch s2/new; rm s2/sub/b.py; diff -rq src s2; echo $?',
    'cp -r src s2; echo x >> s2/a.py; echo n > s2/new; rm s2/sub/b.py; diff -rN src s2; echo $?',
    "cp -r src s2; echo x >> s2/a.py; echo n > s2/new; diff -ruN src s2 | grep -v '^[-+][-+]'",
    'cp -r src s2; echo x >> s2/a.py; diff src s2; echo $?',
    "cp -r src s2; echo x >> s2/a.py; diff -r --exclude='*.py' src s2; echo $?",
    'cp -r src s2; rm s2/a.py; mkdir s2/a.py; diff -r src s2; echo $?',
    'diff src/a.py src; echo $?', 'cp p1 src/p1; diff p1 src; echo $?', 'diff p2 src; echo $?',
    'head -c 100 /dev/zero > z1; head -c 101 /dev/zero > z2; diff z1 z2; echo $?',
    'head -c 100 /dev/zero > z1; head -c 101 /dev/zero > z2; diff -q z1 z2; echo $?',
    'diff --color=never p1 p2', 'diff --label A --label B -u p1 p2',
    "diff -U1 <(seq 20) <(seq 20 | sed 's/10/x/')  | tail -n +3",
    "diff -U0 <(seq 20) <(seq 20 | sed 's/10/x/')  | tail -n +3",
    "diff -u <(seq 100) <(seq 100 | sed '/5/d') | tail -n +3",
    "diff <(seq 100) <(seq 100 | sed '/5/d')",
    "diff -c <(seq 100) <(seq 100 | sed '/5/d') | tail -n +3", 'diff; echo $?',
    'diff p1; echo $?', 'diff -Z p1 p2; echo $?', 'diff p1 p2 p1; echo $?',
    'diff --foo p1 p2; echo $?',
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_diff_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)


@pytest.mark.parametrize("seed", range(12))
async def test_random_edits_match_gnu(seed: int, same_as_gnu: Compare) -> None:
    pick = random.Random(seed)
    old = [pick.choice("abcdefghij") * pick.randint(1, 3) for _ in range(40)]
    new = [line for line in old if pick.random() > 0.15]
    for _ in range(4):
        new.insert(pick.randrange(len(new)), pick.choice("klmno"))
    texts = ["\\n".join(side) + "\\n" for side in (old, new)]
    await same_as_gnu(
        f"printf '{texts[0]}' > o; printf '{texts[1]}' > n; diff o n | grep -c '^[<>]'"
    )


async def test_unified_diff_applies_with_patch(run: Run) -> None:
    await run("seq 50 > a; sed 's/7/seven/; 20d' a > b; diff -u a b > p; patch a < p")
    result = await run("cmp a b && echo same")
    assert result.stdout == "same\n"


async def test_large_files_with_nothing_in_common_are_compared_in_time(run: Run) -> None:
    result = await run("seq 1 30000 > a; seq 50001 80000 > b; diff a b | head -1")
    assert result.stdout == "1,30000c1,30000\n"


async def test_many_scattered_edits_are_minimal(run: Run) -> None:
    result = await run("seq 20000 > a; sed 's/7/x/' a > b; diff a b | grep -c '^<'; grep -c 7 a")
    found, expected = map(int, result.stdout.split())
    assert found == expected


async def test_lines_that_are_not_utf8_are_compared_by_bytes(run: Run) -> None:
    result = await run(r"printf 'a\xff\n' > a; printf 'a\xfe\n' > b; diff -q a b; echo $?")
    assert result.stdout == "Files a and b differ\n1\n"
