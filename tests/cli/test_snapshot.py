"""`smokebox snapshot` and `smokebox fork`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.command_line import CommandLine


def test_snapshot_is_made_listed_compared_restored_and_removed(cli: CommandLine) -> None:
    cli.output("create", "snap-one")
    cli.output("exec", "snap-one", "echo 1 > f")
    id = cli.output("snapshot", "create", "snap-one", "cli-first", "-m", "of a test").strip()
    listed = cli.output("snapshot", "ls", "snap-one").splitlines()
    assert listed[1].split()[:4] == [id, "cli-first", "snap-one", "host"]
    assert listed[1].endswith("of a test")
    cli.output("exec", "snap-one", "echo 2 > f; touch g")
    changed = "M /workspace/f\n    --- a/workspace/f\n    +++ b/workspace/f\n    @@ -1 +1 @@\n"
    assert cli.output("snapshot", "diff", "cli-first", "-u") == (
        f"{changed}    -1\n    +2\nA /workspace/g\n"
    )
    restored = cli.output("snapshot", "restore", "snap-one", "cli-first", "--save-as", "cli-second")
    assert restored == "Restored snap-one to cli-first\n"
    assert cli.output("exec", "snap-one", "cat f; ls") == "1\nf\n"
    assert cli.output("snapshot", "diff", "cli-second", "cli-first").splitlines() == [
        "M /workspace/f",
        "D /workspace/g",
    ]
    cli.output("rm", "snap-one")
    cli.output("snapshot", "rm", "cli-first", "cli-second")
    assert json.loads(cli.output("snapshot", "ls", "--json")) == []
    done = cli.run("snapshot", "rm", "cli-first")
    assert (done.returncode, "there is no snapshot 'cli-first'" in done.stderr) == (1, True)


def test_old_snapshots_are_pruned(cli: CommandLine) -> None:
    cli.output("create", "prune-one")
    made = [cli.output("snapshot", "create", "prune-one") for _ in range(3)]
    made.append(cli.output("snapshot", "create", "prune-one", "--keep-last", "3"))
    assert (
        cli.output("snapshot", "prune", "prune-one", "--keep-last", "1", "--keep-for", "1d") == ""
    )
    assert cli.output("snapshot", "prune", "prune-one", "--keep-last", "1") == "".join(made[1:3])
    done = cli.run("snapshot", "prune", "prune-one")
    assert (done.returncode, "keep_last or keep_for" in done.stderr) == (2, True)
    cli.output("snapshot", "rm", made[3].strip())
    cli.output("rm", "prune-one")


def test_forks_are_printed(cli: CommandLine) -> None:
    cli.output("create", "fork-one")
    cli.output("exec", "fork-one", "echo 1 > f")
    ids = cli.output("fork", "fork-one", "-n", "2").split()
    assert [id.startswith("fork-one-") for id in ids] == [True, True]
    assert cli.output("exec", ids[1], "cat f") == "1\n"
    (named,) = json.loads(cli.output("fork", "fork-one", "--id", "fork-two", "--json"))
    assert named["id"] == "fork-two"
    cli.output("rm", "fork-one", "fork-two", *ids)
