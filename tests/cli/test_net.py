"""`smokebox net`: the network log of a sandbox, and changes of its egress policy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from smokebox.cli.net import line_of
from smokebox.types import NetworkEvent

if TYPE_CHECKING:
    from cli.served import Served

ASK = "curl -s -m 5 http://other.test/; true"


def test_log_has_a_line_for_a_refused_request(served: Served, box: str) -> None:
    assert served.says("net", box) == ""
    served.says("net", box, "--allow", "api.test")
    served.says("exec", box, ASK)
    told = served.says("net", box)
    assert "refused" in told
    assert "other.test" in told
    (event,) = json.loads(served.says("net", box, "--json"))
    assert (event["host"], event["verdict"]) == ("other.test", "refused")


def test_policy_is_changed_and_shown(served: Served, box: str) -> None:
    assert served.says("net", box, "--allow", "*.example.com", "--deny", "evil.test") == ""
    policy = json.loads(served.says("net", box, "--policy"))
    assert policy["opened_hosts"] == ["*.example.com"]
    assert policy["denied_hosts"] == ["evil.test"]
    assert policy["internet"] is False
    served.says("net", box, "--internet")
    assert json.loads(served.says("net", box, "--policy"))["internet"] is True
    served.says("net", box, "--no-internet")
    assert json.loads(served.says("net", box, "--policy"))["internet"] is False


def test_invalid_host_is_one_line_and_a_hint(served: Served, box: str) -> None:
    done = served.run("net", box, "--allow", "https://api.test/")
    assert done.returncode != 0
    assert "is a URL" in done.stderr


def test_missing_sandbox_is_not_created(served: Served) -> None:
    done = served.run("net", "never-made")
    assert done.returncode != 0
    assert "there is no sandbox 'never-made'" in done.stderr


def test_log_is_followed(served: Served, box: str) -> None:
    served.says("net", box, "--allow", "api.test")
    with served.started("net", box, "-f", "--json") as process:
        assert process.stdout is not None
        # Following starts when it is connected: send requests until one is seen.
        while True:
            served.says("exec", box, ASK)
            import select

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
    line = line_of(event)
    assert line.isprintable()
    assert "https://[::1]:8080/\\x1b[2Jx\\nfaked 200 1/2 [internet] by bearer" in line
