"""Commands on background processes: start, ps, logs, kill."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cli.served import until
from cli.terminal import PATIENCE

if TYPE_CHECKING:
    from cli.served import Served


def processes(served: Served, box: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(served.says("ps", box, "--json"))
    return found


def test_start_prints_the_id_and_ps_lists_it(served: Served, box: str) -> None:
    id = served.says("start", box, "--", "sleep", "1000").strip()
    assert served.says("start", box, "--name", "web", "sleep 1000") == "web\n"
    assert [one["id"] for one in processes(served, box)] == [id, "web"]
    lines = served.says("ps", box).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[id, "running"], ["web", "running"]]
    assert lines[2].endswith("sleep 1000")


def test_start_sets_directory_and_variables(served: Served, box: str) -> None:
    served.says("start", box, "--name", "p", "-w", "/tmp", "-e", "A=1", "pwd; echo $A")
    assert served.says("logs", box, "p", "-f") == "/tmp\n1\n"


def test_logs_keep_streams_apart(served: Served, box: str) -> None:
    served.says("start", box, "--name", "p", "echo out; echo err >&2")
    done = served.run("logs", box, "p", "--follow")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")
    done = served.run("logs", box, "p")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")


def test_follow_prints_output_until_the_process_ends(served: Served, box: str) -> None:
    command = "echo first; until [ -e /tmp/go ]; do sleep 0.02; done; echo last"
    served.says("start", box, "--name", "p", command)
    with served.started("logs", box, "p", "-f") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        served.says("exec", box, "touch /tmp/go")
        assert process.stdout.readline() == "last\n"
        assert process.wait(PATIENCE) == 0


def test_interrupted_follow_leaves_the_process_running(served: Served, box: str) -> None:
    served.says("start", box, "--name", "p", "echo first; sleep 1000")
    with served.started("logs", box, "p", "-f") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.send_signal(2)
        assert process.wait(PATIENCE) == 130
    assert [one["status"] for one in processes(served, box)] == ["running"]


def test_kill_kills_one_or_all(served: Served, box: str) -> None:
    for name in ("a", "b", "c"):
        served.says("start", box, "--name", name, "sleep 1000")
    assert served.says("kill", box, "a") == ""
    assert [one["status"] for one in processes(served, box)] == ["killed", "running", "running"]
    assert served.says("kill", box, "--all") == ""
    assert {one["status"] for one in processes(served, box)} == {"killed"}


def test_kill_sends_the_given_signal(served: Served, box: str) -> None:
    # Python alone: bash would report the signal that its children got.
    script = (
        "import signal, time; signal.signal(1, lambda *_: print('caught', flush=True));"
        "print('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    served.says("start", box, "--name", "p", "python3", "-c", script)
    until(lambda: served.says("logs", box, "p") == "ready\n")
    assert served.says("kill", box, "p", "-s", "HUP") == ""
    until(lambda: served.says("logs", box, "p") == "ready\ncaught\n")
    assert served.says("kill", box, "p", "-s", "1") == ""
    until(lambda: served.says("logs", box, "p") == "ready\ncaught\ncaught\n")
    assert [one["status"] for one in processes(served, box)] == ["running"]
