"""Client of an app: work outlives its client and restarts of the app."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from smokebox import AgentClient, sync
from smokebox.errors import (
    Aborted,
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    NotFound,
    ServiceUnavailable,
    SmokeboxError,
    Unauthorized,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ECHO = """
from smokebox import create_agent
from smokebox.testing import ScriptedModel
from smokebox.testing.scripted import last_text

agent = create_agent(model=ScriptedModel(then=lambda request: "re: " + last_text(request)))
"""
SLOW = """
from smokebox import create_agent
from smokebox.testing import ScriptedModel, call

agent = create_agent(model=ScriptedModel(then=lambda _: call("bash", command="sleep 60")))
"""
GUARDED = """
from smokebox import create_agent
from smokebox.testing import ScriptedModel, call
from smokebox.testing.scripted import last_returns

def reply(request):
    returns = last_returns(request)
    return returns[0].text if returns else call("bash", command="echo ran")

agent = create_agent(
    model=ScriptedModel(then=reply),
    approval={"ask": ["bash"]},
)
"""
ADD = """
async def run(ctx):
    ctx.log.info("adding", numbers=ctx.payload)
    return {"sum": sum(ctx.payload)}
"""
SERVE = """
import sys, uvicorn
from smokebox.app import create_app
app = create_app(sys.argv[1])
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", timeout_graceful_shutdown=1)
"""


class App:
    """App in a separate process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", SERVE, str(self.folder), str(self.port)]
        self.process = subprocess.Popen(command)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
                break
        raise AssertionError("the app did not start")

    def stop(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    files = {"agents/echo": ECHO, "agents/slow": SLOW, "agents/guarded": GUARDED}
    for name, text in {**files, "workflows/add": ADD}.items():
        (root / f"{name}.py").parent.mkdir(exist_ok=True)
        (root / f"{name}.py").write_text(text)
    return root


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    app = App(folder)
    app.start()
    yield app
    app.stop(signal.SIGKILL)


@pytest.fixture
def client(app: App) -> AgentClient:
    return AgentClient(app.url)


async def test_agent_replies(client: AgentClient) -> None:
    reply = await client.ask("echo", "one", "hello")
    assert (str(reply), reply.text, reply.data) == ("re: hello", "re: hello", None)
    assert reply.usage["requests"] == 1


async def test_stream_yields_events_until_the_reply(client: AgentClient) -> None:
    seen = [event async for event in client.stream("echo", "heard", "hello")]
    kinds = [event.type for event in seen]
    assert (kinds[0], kinds[-1]) == ("work_accepted", "work_ended")
    assert seen[-1].data["text"] == "re: hello"
    assert [event.offset for event in seen] == sorted({event.offset for event in seen})


async def test_history_and_follow_start_at_any_offset(client: AgentClient) -> None:
    await client.ask("echo", "history", "first")
    await client.ask("echo", "history", "second")
    events = await client.history("echo", "history")
    later = await client.history("echo", "history", offset=events[3].offset)
    assert later == events[4:]
    async with contextlib.aclosing(client.follow("echo", "history")) as following:
        assert [await anext(following) for _ in events] == events
    found = {one.id: one.working for one in await client.conversations("echo")}
    assert found["history"] == 0


async def test_submission_is_found_by_its_id(app: App, client: AgentClient) -> None:
    sent = await client.send("echo", "again", "hello")
    other = AgentClient(app.url).submission(sent.id)
    assert str(await other.wait(15)) == "re: hello"
    assert [one.type async for one in other.events()][-1] == "work_ended"
    assert (await other.info()).outcome == "completed"


async def test_same_idempotency_key_is_accepted_once(client: AgentClient) -> None:
    first = await client.send("echo", "once", "hello", key="k-1")
    second = await client.send("echo", "once", "hello", key="k-1")
    assert first.id == second.id
    with pytest.raises(Conflict, match="k-1"):
        await client.send("echo", "once", "other", key="k-1")


async def test_workflow_runs_and_logs(client: AgentClient) -> None:
    run = await client.run("add", [1, 2, 3])
    assert (await run.wait(15)).result == {"sum": 6}
    logged = [event async for event in run.events() if event.type == "log"]
    assert logged[0].data == {
        "level": "info",
        "message": "adding",
        "fields": {"numbers": [1, 2, 3]},
    }


async def test_failure_of_work_is_raised_as_its_class(client: AgentClient) -> None:
    run = await client.run("add", ["a"])
    with pytest.raises(SmokeboxError, match="TypeError"):
        await run.wait(15)


async def test_timeout_of_wait_does_not_stop_the_work(client: AgentClient) -> None:
    sent = await client.send("slow", "waiting", "work")
    with pytest.raises(DeadlineExceeded, match="still running"):
        await sent.wait(0.2)
    assert (await sent.info()).state != "ended"
    assert await sent.abort()
    with pytest.raises(Aborted):
        await sent.wait(15)
    assert not await sent.abort()


async def test_abort_stops_running_and_queued_work(client: AgentClient) -> None:
    sent = [await client.send("slow", "off", f"work {number}") for number in range(3)]
    assert sorted(await client.abort("slow", "off")) == sorted(one.id for one in sent)
    for one in sent:
        with pytest.raises(Aborted):
            await one.wait(15)
    await client.delete("slow", "off")
    assert await client.history("slow", "off") == []


async def test_tool_call_waits_for_approval(client: AgentClient) -> None:
    for decide, id in ((client.approve, "approved"), (client.deny, "denied")):
        sent = await client.send("guarded", id, "go")
        async for event in sent.events():
            if event.type == "approval_requested":
                await decide("guarded", id, event.data["call_id"])
        assert ("ran" in str(await sent.wait(15))) == (id == "approved")
    with pytest.raises(NotFound, match="waits for approval"):
        await client.approve("guarded", "approved", "call-none")


async def test_agent_client_without_await(app: App) -> None:
    def work() -> list[str]:
        with sync.AgentClient(app.url) as client:
            assert str(client.ask("echo", "sync", "hello")) == "re: hello"
            sent = client.send("echo", "sync", "again")
            assert sent.wait(15).text == "re: again"
            return [event.type for event in client.stream("echo", "sync", "third")]

    assert (await asyncio.to_thread(work))[-1] == "work_ended"


async def test_invalid_names_are_refused_at_once(client: AgentClient) -> None:
    with pytest.raises(NotFound, match="echo, guarded, slow"):
        await client.ask("ecco", "one", "hello")
    with pytest.raises(InvalidOption, match="letters, digits"):
        await client.ask("echo", "a b", "hello")
    with pytest.raises(InvalidOption, match="message is empty"):
        await client.ask("echo", "one", "  ")
    with pytest.raises(InvalidOption, match="id is a non-empty str"):
        await client.ask("echo", "", "hello")
    with pytest.raises(NotFound, match="no submission"):
        await client.submission("none").wait()
    with pytest.raises(InvalidOption, match="address of a server"):
        AgentClient("localhost:8000")


async def test_unreachable_app_raises_service_unavailable(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.client.agent_client.OUTAGE_SECONDS", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = AgentClient(f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(ServiceUnavailable):
            await nowhere.ask("echo", "one", "hello")


async def test_app_with_keys_requires_one(folder: Path, tmp_path: Path) -> None:
    app = App(tmp_path)
    for part in ("agents", "workflows"):
        (tmp_path / part).symlink_to(folder / part)
    (tmp_path / ".env").write_text("SMOKEBOX_APP_KEYS=first-key, second-key\n")
    app.start()
    try:
        assert str(await AgentClient(app.url, key="second-key").ask("echo", "a", "b")) == "re: b"
        for key in (None, "wrong-key"):
            with pytest.raises(Unauthorized, match="keys create"):
                await AgentClient(app.url, key=key).ask("echo", "a", "b")
    finally:
        app.stop(signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_work_resumes_after_a_restart_of_the_app(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "smokebox.toml").write_text('[app]\ngrace = "1s"\n')
    (tmp_path / "agents" / "patient.py").write_text(
        """
from pathlib import Path
from smokebox import create_agent
from smokebox.testing import ScriptedModel, call

GO = Path(__file__).parent.parent / "go"

async def check_time() -> str:
    '''Wait until it is time.'''
    import asyncio
    while not GO.exists():
        await asyncio.sleep(0.05)
    return "it is"

agent = create_agent(
    model=ScriptedModel(call("check_time"), then="It is time."), tools=[check_time], sandbox=None
)
"""
    )
    app = App(tmp_path)
    app.start()
    try:
        client = AgentClient(app.url)
        sent = await client.send("patient", "one", "Is it time?")
        queued = await client.send("patient", "one", "And now?")
        async for event in sent.events():
            if event.type == "tool_started":
                break
        app.stop(number)
        waiting = asyncio.create_task(queued.wait(18))
        (tmp_path / "go").touch()
        app.start()
        assert str(await sent.wait(15)) == "It is time."
        assert str(await waiting) == "It is time."
        later = [one async for one in sent.events(offset=event.offset)]
        assert later[-1].type == "work_ended"
        assert event.offset not in [one.offset for one in later]
    finally:
        app.stop(signal.SIGKILL)
