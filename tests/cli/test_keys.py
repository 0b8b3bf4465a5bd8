"""`smokebox keys`: create, list and revoke."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from cli.command_line import CommandLine
from cli.served_project import run_project

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def fresh(tmp_path: Path) -> CommandLine:
    """Return the command line with a state directory that does not exist yet."""
    return CommandLine(tmp_path / "data" / "home")


def test_key_is_printed_once_and_listed_without_its_secret(cli: CommandLine) -> None:
    key = cli.output("keys", "create", "--name", "ci", "--prefix", "ci-").strip()
    listed = cli.output("keys", "ls")
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
        one["id"] for one in json.loads(cli.output("keys", "ls", "--json"))
    ]
    done = cli.run("keys", "revoke", created["id"])
    assert (done.returncode, done.stdout) == (1, "")
    assert f"there is no key '{created['id']}'" in done.stderr


def test_key_is_created_and_revoked_without_starting_a_server(fresh: CommandLine) -> None:
    key = fresh.output("keys", "create", "--name", "ci", "--prefix", "ci-").strip()
    id = key.split("_")[1]
    assert id in fresh.output("keys", "ls")
    assert "No server is running" in fresh.run("status").stderr
    done = fresh.run("keys", "create", "--name", "b", "--profile", "none")
    assert (done.returncode, "[profiles.NAME]" in done.stderr) == (2, True)
    assert fresh.output("keys", "revoke", id) == ""
    assert id not in fresh.output("keys", "ls")


def test_key_made_first_opens_the_server_and_the_app(fresh: CommandLine, tmp_path: Path) -> None:
    """The order in which docs/server.md and docs/app.md show the commands."""
    key = fresh.output("keys", "create", "--name", "ci", "--prefix", "ci-").strip()
    headers = {"Authorization": f"Bearer {key}"}
    folder = tmp_path / "demo"
    fresh.output("init", str(folder))
    with fresh.start("serve", "--keys", "--port", "0") as server:
        assert server.stdout is not None
        url = f"{server.stdout.readline().split()[3]}/api/sandboxes"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            assert json.load(response) == {"sandboxes": []}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url)
        server.terminate()
        assert server.wait(20) == 0
    home = str(fresh.home)
    with run_project(folder, "app", "--keys", SMOKEBOX_HOME=home) as app:
        path = "/agents/assistant/ci-me?wait=result"
        done = app.request(path, {"message": "Hello"}, headers=headers)
        assert done["outcome"] == "completed"
        assert app.request("/agents")["error"]["code"] == "unauthorized"
        fresh.output("keys", "revoke", key.split("_")[1])
        assert app.request("/agents", headers=headers)["error"]["code"] == "unauthorized"
