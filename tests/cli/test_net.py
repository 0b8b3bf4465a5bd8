"""`smokebox net`: the network log of a sandbox, and changes of its egress policy."""

from __future__ import annotations

import json
import select
from typing import TYPE_CHECKING

from smokebox.cli.net import format_event
from smokebox.types import NetworkEvent

if TYPE_CHECKING:
    from cli.command_line import CommandLine

REQUEST = "curl -s -m 5 http://other.test/; true"


def test_log_has_a_line_for_a_refused_request(cli: CommandLine, sandbox: str) -> None:
    assert cli.output("net", sandbox) == ""
    cli.output("net", sandbox, "--allow", "api.test")
    cli.output("exec", sandbox, REQUEST)
    output = cli.output("net", sandbox)
    assert "refused" in output
    assert "other.test" in output
    (event,) = json.loads(cli.output("net", sandbox, "--json"))
    assert (event["host"], event["verdict"]) == ("other.test", "refused")


def test_policy_is_changed_and_shown(cli: CommandLine, sandbox: str) -> None:
    assert cli.output("net", sandbox, "--allow", "*.example.com", "--deny", "evil.test") == ""
    policy = json.loads(cli.output("net", sandbox, "--policy"))
    assert policy["opened_hosts"] == ["*.example.com"]
    assert policy["denied_hosts"] == ["evil.test"]
    assert policy["internet"] is False
    cli.output("net", sandbox, "--internet")
    assert json.loads(cli.output("net", sandbox, "--policy"))["internet"] is True
    cli.output("net", sandbox, "--no-internet")
    assert json.loads(cli.output("net", sandbox, "--policy"))["internet"] is False


def test_invalid_host_is_one_line_and_a_hint(cli: CommandLine, sandbox: str) -> None:
    done = cli.run("net", sandbox, "--allow", "https://api.test/")
    assert done.returncode != 0
    assert "is a URL" in done.stderr


def test_missing_sandbox_is_not_created(cli: CommandLine) -> None:
    done = cli.run("net", "not-created")
    assert done.returncode != 0
    assert "there is no sandbox 'not-created'" in done.stderr


def test_log_is_followed(cli: CommandLine, sandbox: str) -> None:
    cli.output("net", sandbox, "--allow", "api.test")
    with cli.start("net", sandbox, "-f", "--json") as process:
        assert process.stdout is not None
        # Events before the connection are not followed: send requests until one is seen.
        while True:
            cli.output("exec", sandbox, REQUEST)
            if select.select([process.stdout], [], [], 0.2)[0]:
                break
        assert json.loads(process.stdout.readline())["host"] == "other.test"


def test_control_characters_do_not_reach_the_terminal() -> None:
    event = NetworkEvent(
        cursor=1,
        at=0.0,
        verdict="forwarded",
        host="::1",
        port=8080,
        rule="internet",
        method="GET",
        path="/\x1b[2Jx\nfaked",
        status=200,
        sent=1,
        received=2,
        handler="bearer",
    )
    line = format_event(event)
    assert line.isprintable()
    assert "https://[::1]:8080/\\x1b[2Jx\\nfaked 200 1/2 [internet] by bearer" in line
