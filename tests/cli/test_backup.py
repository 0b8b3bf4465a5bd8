"""`smokebox backup`: create, list, restore and remove."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.served import Served


def test_backup_is_created_listed_restored_and_removed(served: Served) -> None:
    served.says("create", "kept-one")
    served.says("exec", "kept-one", "echo 1 > f; touch f.tmp")
    words = ["--name", "one", "--ttl", "2d", "--exclude", "*.tmp"]
    id = served.says("backup", "create", "kept-one", "/workspace", *words).strip()
    listed = served.says("backup", "list", "kept-one").splitlines()
    assert listed[0].split() == [
        "ID", "SANDBOX", "PATH", "NAME", "FILES", "SIZE", "CREATED", "EXPIRES",
    ]  # fmt: skip
    assert listed[1].split()[:5] == [id, "kept-one", "/workspace", "one", "1"]
    assert listed[1].endswith("in 1d")
    served.says("exec", "kept-one", "echo 2 > f")
    assert (
        served.says("backup", "restore", "kept-one", id)
        == f"Restored 1 files of {id} to /workspace\n"
    )
    assert served.says("exec", "kept-one", "cat f; ls") == "1\nf\n"
    served.says("rm", "kept-one")
    # Restoring creates a missing sandbox.
    done = json.loads(served.says("backup", "restore", "kept-two", id, "/copy", "--json"))
    assert (done["path"], done["files"]) == ("/copy", 1)
    assert served.says("exec", "kept-two", "cat /copy/f") == "1\n"
    assert served.says("backup", "rm", id) == ""
    found = json.loads(served.says("backup", "list", "--json"))
    assert id not in [one["id"] for one in found]


def test_unknown_backup_or_sandbox_is_an_error(served: Served) -> None:
    done = served.run("backup", "rm", "b-none")
    assert (done.returncode, "there is no backup 'b-none'" in done.stderr) == (1, True)
    done = served.run("backup", "create", "no-such-box")
    assert (done.returncode, "there is no sandbox 'no-such-box'" in done.stderr) == (1, True)
