"""`ls` prints what GNU ls prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare, Run

SCRIPTS = [
    "ls", "ls -a", "ls -A", "ls -1", "ls -r", "ls -R", "ls -R src", "ls -p", "ls -F",
    "ls -F src", "ls -S", "ls -Sr", "ls -s", "ls -s src", "ls -C", "ls -x", "ls -m", "ls -Q",
    "ls -X", "ls -d src", "ls -d src empty .", "ls -d */", "ls -d .*", "ls src empty",
    "ls src f.txt", "ls nothere f.txt", "ls nothere src; echo $?", "ls empty", "ls -a empty",
    "ls -l empty", "ls -l src | sed 's/ [A-Z][a-z][a-z] .*:.. / T /; s/root/user/g'",
    "ls -ln src | cut -d' ' -f1-2", "ls -l lnk | sed 's/.* lnk/lnk/'",
    "ls -lF | sed 's/.*[0-9][0-9]:[0-9][0-9] //'", "ls -la | wc -l", "ls -lL lnk | cut -c1",
    "ls --color=never -a", "ls --color=auto", "ls --group-directories-first", "ls --zz; echo $?",
    "ls src/a.py", "ls src/", "ls -- f.txt", "ls ''; echo $?", "dir src", "vdir src | head -1",
    "touch v1.10 v1.9 v1.2; ls -v v*", "ln -s src dl; ls dl", "ln -s src dl; ls -l dl | cut -c1",
    "ln -s src dl; ls -F", "ln -s src dl; ls dl/", "ln -s nowhere bad; ls bad",
    "ln -s nowhere bad; ls -l bad | cut -c1", "ln -s nowhere bad; ls bad/; echo $?",
    "head -c 1500 /dev/zero > k; head -c 15000 /dev/zero > m; ls -lh k m | awk '{print $5}'",
    "head -c 1500 /dev/zero > k; head -c 15000 /dev/zero > m; ls -sh k m",
    "touch -d '2020-01-01 10:00' f.txt; ls -l f.txt | sed 's/root/user/g'",
    "touch -d '2020-01-01 10:00' f.txt; ls -l --time-style=+%s f.txt | sed 's/root/user/g'",
    "touch -d '2020-01-01' a1; touch -d '2021-01-01' a2; touch -d '2019-01-01' a3; ls -t a?",
    "touch -d '2020-01-01' a1; touch -d '2021-01-01' a2; touch -d '2019-01-01' a3; ls -tr a?",
    "mkdir m; cd m; for i in $(seq 40); do touch file$i; done; ls -C",
    "mkdir m; cd m; for i in $(seq 40); do touch file$i; done; ls -x",
    "mkdir m; cd m; for i in $(seq 40); do touch file$i; done; ls -m",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_ls_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)


async def test_missing_file_is_reported_as_gnu_does(run: Run) -> None:
    result = await run("ls nothere")
    assert result.stderr == "ls: cannot access 'nothere': No such file or directory\n"
    assert result.exit_code == 2


async def test_unknown_metadata_is_not_invented(run: Run) -> None:
    result = await run("touch a; ls -i a; stat -c %i a")
    assert result.stdout == "? a\n?\n"


async def test_large_directory_is_listed_whole(run: Run) -> None:
    result = await run("mkdir d; cd d; touch $(seq 2000); ls | wc -l; ls -l | wc -l")
    assert result.stdout.split() == ["2000", "2001"]
