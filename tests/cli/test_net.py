"""`smokebox net`: the audit log of a sandbox, and changes of what it may reach."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from smokebox.cli.net import line_of
from smokebox.types import NetworkEvent

if TYPE_CHECKING:
    from cli.served import Served

ASK = "curl -s -m 5 http://other.test/; true"


def test_the_log_has_a_line_for_what_was_refused(served: Served, box: str) -> None:
    assert served.says("net", box) == ""
    served.says("net", box, "--allow", "api.test")
    served.says("exec", box, ASK)
    told = served.says("net", box)
    assert "refused" in told
    assert "other.test" in told
    (event,) = json.loads(served.says("net", box, "--json"))
    assert (event["host"], event["verdict"]) == ("other.test", "refused")


def test_what_it_may_reach_is_changed_and_shown(served: Served, box: str) -> None:
    assert served.says("net", box, "--allow", "*.example.com", "--deny", "evil.test") == ""
    policy = json.loads(served.says("net", box, "--policy"))
    assert policy["opened_hosts"] == ["*.example.com"]
    assert policy["denied_hosts"] == ["evil.test"]
    assert policy["internet"] is False
    served.says("net", box, "--internet")
    assert json.loads(served.says("net", box, "--policy"))["internet"] is True
    served.says("net", box, "--no-internet")
    assert json.loads(served.says("net", box, "--policy"))["internet"] is False


def test_a_host_that_is_none_is_a_line_and_a_hint(served: Served, box: str) -> None:
    done = served.run("net", box, "--allow", "https://api.test/")
    assert done.returncode != 0
    assert "is a URL" in done.stderr


def test_a_sandbox_that_is_not_there_is_not_made(served: Served) -> None:
    done = served.run("net", "never-made")
    assert done.returncode != 0
    assert "there is no sandbox 'never-made'" in done.stderr


def test_it_can_be_followed(served: Served, box: str) -> None:
    served.says("net", box, "--allow", "api.test")
    with served.started("net", box, "-f", "--json") as process:
        assert process.stdout is not None
        # It begins where it is connected: ask until it has heard of one.
        while True:
            served.says("exec", box, ASK)
            import select

            if select.select([process.stdout], [], [], 0.2)[0]:
                break
        assert json.loads(process.stdout.readline())["host"] == "other.test"


def test_what_a_sandbox_asks_for_cannot_speak_to_the_terminal() -> None:
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
    line = line_of(event)
    assert line.isprintable()
    assert "https://[::1]:8080/\\x1b[2Jx\\nfaked 200 1/2 [internet] by bearer" in line
