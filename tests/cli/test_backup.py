"""`smokebox backup`: create, list, restore and remove."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.command_line import CommandLine


def test_backup_is_created_listed_restored_and_removed(cli: CommandLine) -> None:
    cli.output("create", "kept-one")
    cli.output("exec", "kept-one", "echo 1 > f; touch f.tmp")
    words = ["--name", "one", "--ttl", "2d", "--exclude", "*.tmp"]
    id = cli.output("backup", "create", "kept-one", "/workspace", *words).strip()
    listed = cli.output("backup", "ls", "kept-one").splitlines()
    assert listed[0].split() == [
        "ID", "SANDBOX", "PATH", "NAME", "FILES", "SIZE", "CREATED", "EXPIRES",
    ]  # fmt: skip
    assert listed[1].split()[:5] == [id, "kept-one", "/workspace", "one", "1"]
    assert listed[1].endswith("in 1d")
    cli.output("exec", "kept-one", "echo 2 > f")
    assert (
        cli.output("backup", "restore", "kept-one", id)
        == f"Restored 1 files of {id} to /workspace\n"
    )
    assert cli.output("exec", "kept-one", "cat f; ls") == "1\nf\n"
    cli.output("rm", "kept-one")
    # Restoring creates a missing sandbox.
    done = json.loads(cli.output("backup", "restore", "kept-two", id, "/copy", "--json"))
    assert (done["path"], done["files"]) == ("/copy", 1)
    assert cli.output("exec", "kept-two", "cat /copy/f") == "1\n"
    assert cli.output("backup", "rm", id) == ""
    found = json.loads(cli.output("backup", "ls", "--json"))
    assert id not in [one["id"] for one in found]


def test_unknown_backup_or_sandbox_is_an_error(cli: CommandLine) -> None:
    done = cli.run("backup", "rm", "b-none")
    assert (done.returncode, "there is no backup 'b-none'" in done.stderr) == (1, True)
    done = cli.run("backup", "create", "no-such-sandbox")
    assert (done.returncode, "there is no sandbox 'no-such-sandbox'" in done.stderr) == (1, True)
