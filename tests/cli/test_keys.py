"""`smokebox keys`: create, list and revoke."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.command_line import CommandLine


def test_key_is_printed_once_and_listed_without_its_secret(cli: CommandLine) -> None:
    key = cli.output("keys", "create", "--name", "ci", "--prefix", "ci-").strip()
    listed = cli.output("keys", "list")
    assert key.split("_")[1] in listed
    assert key.split("_")[2] not in listed
    assert ["ci", "ci-", "no"] in [line.split()[1:4] for line in listed.splitlines()]


def test_key_expires_at_the_given_time(cli: CommandLine) -> None:
    words = ["--name", "short", "--expires", "30d", "--admin", "--json"]
    created = json.loads(cli.output("keys", "create", *words))
    assert created["admin"] is True
    assert abs(created["expires_at"] - time.time() - 30 * 86400) < 600


def test_key_is_shown_with_its_ceilings_and_use(cli: CommandLine) -> None:
    words = ["--name", "acme", "--prefix", "acme", "--scopes", "sandboxes:read,runs"]
    created = json.loads(cli.output("keys", "create", *words, "--json"))
    assert created["prefix"] == "acme-"
    shown = cli.output("keys", "show", created["id"])
    lines = [line.split() for line in shown.splitlines()]
    assert ["profile", "default"] in lines
    assert ["scopes", "sandboxes:read,", "runs:read,", "runs:write"] in lines
    assert ["memory", "4.0", "GiB"] in lines
    assert ["sandboxes", "0", "unlimited"] in lines
    details = json.loads(cli.output("keys", "show", created["id"], "--json"))
    assert details["quotas"][0] == {"name": "sandboxes", "used": 0, "ceiling": None}
    done = cli.run("keys", "create", "--name", "b", "--prefix", "acme-b")
    assert done.returncode == 1
    assert "--overlap" in done.stderr
    cli.output("keys", "create", "--name", "b", "--prefix", "acme-b", "--overlap")


def test_revoked_key_is_not_listed(cli: CommandLine) -> None:
    created = json.loads(cli.output("keys", "create", "--name", "gone", "--json"))
    assert cli.output("keys", "revoke", created["id"]) == ""
    assert created["id"] not in [
        one["id"] for one in json.loads(cli.output("keys", "list", "--json"))
    ]
    done = cli.run("keys", "revoke", created["id"])
    assert (done.returncode, done.stdout) == (1, "")
    assert f"there is no key '{created['id']}'" in done.stderr
