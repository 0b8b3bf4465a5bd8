"""`smokebox keys`: create, list and revoke."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.served import Served


def test_key_is_printed_once_and_listed_without_its_secret(served: Served) -> None:
    key = served.says("keys", "create", "--name", "ci", "--prefix", "ci-").strip()
    listed = served.says("keys", "list")
    assert key.split("_")[1] in listed
    assert key.split("_")[2] not in listed
    assert ["ci", "ci-", "no"] in [line.split()[1:4] for line in listed.splitlines()]


def test_key_expires_at_the_given_time(served: Served) -> None:
    words = ["--name", "short", "--expires", "30d", "--admin", "--json"]
    made = json.loads(served.says("keys", "create", *words))
    assert made["admin"] is True
    assert abs(made["expires_at"] - time.time() - 30 * 86400) < 600


def test_revoked_key_is_not_listed(served: Served) -> None:
    made = json.loads(served.says("keys", "create", "--name", "gone", "--json"))
    assert served.says("keys", "revoke", made["id"]) == ""
    assert made["id"] not in [
        one["id"] for one in json.loads(served.says("keys", "list", "--json"))
    ]
    done = served.run("keys", "revoke", made["id"])
    assert (done.returncode, done.stdout) == (1, "")
    assert f"there is no key '{made['id']}'" in done.stderr
