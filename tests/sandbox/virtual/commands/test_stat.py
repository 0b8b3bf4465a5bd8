"""`stat` prints what GNU stat prints, for the metadata that a sandbox has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare

SCRIPTS = [
    "stat -c '%n %s %a %A %F' f.txt src lnk .hid", "stat -c '%N' lnk f.txt", "stat -c %f f.txt src",
    "touch -d '2020-01-01 10:00' f.txt; stat -c '%y %Y' f.txt", "stat -L -c '%F %s' lnk",
    r"stat --printf='%n\t%s\n' f.txt p1", "stat nothere; echo $?", "stat -c '%10s|%-10s|%%' f.txt",
    "stat -c '%b %B %o' f.txt", "stat; echo $?", "stat f.txt | head -2 | sed 's/Device.*//'",
    "stat lnk | head -1", "stat --format=%s f.txt nothere p1; echo $?",
    r"stat --printf '\x41\101\\' p1",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_stat_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)
