"""`zcat` decompresses what GNU zcat decompresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare, Run

SCRIPTS = [
    'gzip -k f.txt && zcat f.txt.gz', 'gzip -k f.txt && zcat f.txt', 'gzip -c f.txt | zcat',
    'zcat f.txt; echo $?', 'zcat -f f.txt', 'gzip -1 -c h.txt | zcat',
    "printf 'junk' | zcat; echo $?", 'gzip -k f.txt; gzcat f.txt.gz 2>/dev/null || zcat f.txt.gz',
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_zcat_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)


async def test_binary_data_round_trips(run: Run) -> None:
    result = await run("head -c 5000 /dev/urandom > r; gzip -k r; zcat r.gz | cmp - r && echo same")
    assert result.stdout == "same\n"


async def test_highly_compressible_data_is_decompressed(run: Run) -> None:
    result = await run("truncate -s 5000000 z; gzip z; zcat z.gz | wc -c")
    assert result.stdout == "5000000\n"


async def test_broken_file_is_an_error(run: Run) -> None:
    result = await run("seq 1000 | gzip > a.gz; head -c 200 a.gz > b.gz; zcat b.gz > out; echo $?")
    assert result.stdout == "1\n"
    assert "unexpected end of file" in result.stderr
