"""Projects: loading of agents and workflows, and errors that name file and line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.site import ADD, ECHO, Site, app_of, project, serve, serve_asgi
from smokebox import create_agent
from smokebox.app import create_app, dispatch
from smokebox.app.definitions import ServedAgent
from smokebox.app.project import load_project
from smokebox.errors import InvalidOption, NotFound, Unsupported
from smokebox.testing import FakeModelServer

if TYPE_CHECKING:
    from pathlib import Path

HOOK = """
triggers = {"webhook": True}
from smokebox.testing import ScriptedModel

async def handler(ctx):
    harness = await ctx.init(model=ScriptedModel(then="from the model"))
    ctx.log.info("prompting", id=ctx.id)
    reply = await (await harness.session()).prompt(ctx.payload["text"])
    return {"id": ctx.id, "text": reply.text, "method": ctx.request["method"], "env": ctx.env.TOKEN}
"""


async def test_index_lists_agents_and_workflows(site: Site) -> None:
    found = (await site.get("/agents")).body
    [echo], [add] = found["agents"], found["workflows"]
    assert (echo["name"], echo["url"]) == ("echo", "/agents/echo")
    assert echo["description"] == "Repeats messages."
    assert add["name"] == "add"


async def test_handler_with_triggers_is_served_as_an_agent(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", agents__hook=HOOK)
    (folder / ".env").write_text("TOKEN=from-dotenv\n")
    async with serve(folder) as site:
        done = await site.post("/agents/hook/t1?wait=result", {"text": "hello"})
        assert done.body["result"] == {
            "id": "t1",
            "text": "from the model",
            "method": "POST",
            "env": "from-dotenv",
        }
        events = site.events("/agents/hook/t2", method="POST", body={"text": "hello"})
        assert "log" in [one.kind async for one in events]


def test_agent_named_agent_wins_over_other_functions(tmp_path: Path) -> None:
    text = """
    triggers = {"webhook": True}
    from smokebox import create_agent

    async def helper(path):
        return path

    other = create_agent(model="test/other")
    agent = create_agent(model="test/this")
    """
    found = load_project(project(tmp_path / "p", agents__both=text)).agents["both"]
    assert isinstance(found, ServedAgent)
    assert found.agent.models == ("test/this",)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("agents__bad", "import no_such_module\n", "agents/bad.py, line 1: ModuleNotFound"),
        ("agents__bad", "x = 1\ndef (:\n", "agents/bad.py, line 2: SyntaxError"),
        ("agents__bad", "import sys\nsys.exit(3)\n", "agents/bad.py, line 2: SystemExit"),
        ("agents__bad", "x = 1\n", "agents/bad.py has no agent"),
        (
            "agents__bad",
            "from smokebox import create_agent\n"
            "a = create_agent(model='x/y')\nb = create_agent(model='x/z')\n",
            "agents/bad.py has several agents: a, b",
        ),
        (
            "agents__bad",
            "\ntriggers = 7\nasync def handler(ctx): ...\n",
            "bad.py, line 2: triggers",
        ),
        (
            "agents__bad",
            "triggers = {'webhok': True}\nasync def handler(ctx): ...\n",
            "bad.py, line 1: triggers",
        ),
        ("agents__bad", "triggers = {}\ndef handler(ctx): ...\n", "bad.py, line 2: handler"),
        ("workflows__bad", "def run(ctx): ...\n", "workflows/bad.py has no `async def run(ctx)`"),
        ("workflows__bad", "async def run(): ...\n", "bad.py, line 1: run must take one argument"),
        (
            "workflows__bad",
            "schedule = '61 * * * *'\nasync def run(ctx): ...\n",
            "bad.py, line 1: schedule must be a cron expression",
        ),
        (
            "workflows__bad",
            "schedule = '* * * * *'\ntimezone = 'Mars'\nasync def run(ctx): ...\n",
            "bad.py, line 2: there is no time zone 'Mars'",
        ),
        ("workflows__bad", "timeout = -1\nasync def run(ctx): ...\n", "bad.py, line 1: timeout"),
        ("workflows__bad", "attempts = 0\nasync def run(ctx): ...\n", "bad.py, line 1: attempts"),
        (
            "workflows__bad",
            "async def run(ctx):\n    return ctx.env.PyBx\n",
            "bad.py, line 2: ",
        ),
        (
            "workflows__bad",
            "from smokebox import env\nasync def run(ctx):\n    return env.NO_SUCH_SECRET\n",
            "bad.py, line 3: the secret NO_SUCH_SECRET is not set",
        ),
        ("agents__bad name", ECHO, "the file name must be letters and digits"),
    ],
)
async def test_bad_file_is_located_and_the_others_are_served(
    tmp_path: Path, file: str, text: str, expected: str
) -> None:
    folder = project(tmp_path / "p", agents__echo=ECHO, **{file: text})
    with pytest.raises(InvalidOption) as caught:
        create_app(folder)
    assert expected in str(caught.value)
    async with serve(folder, strict=False) as site:
        assert (await site.send("echo/one?wait=result", "hello")).status == 200
        listed = (await site.get("/agents")).body
        [bad] = [one for kind in listed.values() for one in kind if one["name"] != "echo"]
        assert expected in bad["error"]


async def test_request_for_a_bad_file_reports_its_error(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", agents__echo=ECHO, agents__bad="1 / 0\n")
    async with serve(folder, strict=False) as site:
        found = await site.send("bad/one", "hello")
        assert found.status == 400
        assert "bad.py, line 1: ZeroDivisionError" in found.body["error"]["message"]


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[sandboxes.PyBox]\nimage = 7\n", "[sandboxes.PyBox]"),
        ("[buckets.KNOWLEDGE_BASE]\nregion = 'x'\n", "[buckets.KNOWLEDGE_BASE]"),
        ("[app]\nretention = 'soon'\n", "[app]: retention"),
        ("[app]\nconcurency = 3\n", "concurrency"),
        ("[app\n", "line 1"),
    ],
)
def test_bad_binding_is_found_at_startup(tmp_path: Path, toml: str, expected: str) -> None:
    folder = project(tmp_path / "p")
    (folder / "smokebox.toml").write_text(toml)
    with pytest.raises(InvalidOption) as caught:
        create_app(folder)
    assert "smokebox.toml" in str(caught.value) and expected in str(caught.value)


async def test_bindings_and_secrets_are_in_the_context(tmp_path: Path) -> None:
    text = """
    async def run(ctx):
        return [type(ctx.env.PyBox).__name__, type(ctx.env.KNOWLEDGE_BASE).__name__, ctx.env.KEY]
    """
    folder = project(tmp_path / "p", workflows__look=text)
    (folder / "smokebox.toml").write_text(
        '[sandboxes.PyBox]\nimage = "host"\n[buckets.KNOWLEDGE_BASE]\nbucket = "kb"\n'
    )
    (folder / ".env").write_text("KEY=secret\n")
    async with serve(folder) as site:
        done = await site.post("/workflows/look?wait=result")
        assert done.body["result"] == ["Binding", "BucketBinding", "secret"]


@pytest.mark.timeout(120)  # The first use of a provider imports its SDK, which takes seconds.
async def test_models_and_keys_come_from_the_project(tmp_path: Path) -> None:
    """The provider gets the key of the project's `.env`, wherever the app was started."""
    text = """
    from smokebox import create_agent
    agent = create_agent(model="openai/gpt-4o", sandbox=None)
    """
    async with FakeModelServer(then="from a server") as models:
        folder = project(tmp_path / "p", agents__real=text)
        (folder / "smokebox.toml").write_text(
            f'[models.openai]\nbase_url = "{models.url}/v1"\napi_key_env = "PROJECT_KEY"\n'
        )
        (folder / ".env").write_text(f"PROJECT_KEY={models.api_key}\n")
        async with serve(folder) as site:
            done = await site.send("real/one?wait=result", "hello")
            assert done.body["result"]["text"] == "from a server"
        [request] = models.received
        assert request.headers["authorization"] == f"Bearer {models.api_key}"


def test_folder_with_nothing_to_serve_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidOption):
            create_app(folder)


async def test_work_is_dispatched_from_a_workflow(tmp_path: Path) -> None:
    text = """
    from smokebox.app import dispatch
    from echo import agent

    async def run(ctx):
        return [
            await dispatch("echo", id="by-name", input="hello"),
            await dispatch(agent, id="by-agent", input="hello", key="once"),
            await dispatch(agent, id="by-agent", input="hello", key="once"),
        ]
    """
    async with serve(project(tmp_path / "p", agents__echo=ECHO, workflows__send=text)) as site:
        done = (await site.post("/workflows/send?wait=result")).body
        one, two, again = done["result"]
        assert two == again
        for id in (one, two):
            assert (await site.outcome(id))["result"]["text"] == "echo: hello"


async def test_invalid_dispatch_is_refused_at_once(folder: Path) -> None:
    with pytest.raises(Unsupported):
        await dispatch("echo", id="one", input="hello")
    async with serve(folder):
        with pytest.raises(NotFound):
            await dispatch("nobody", id="one", input="hello")
        with pytest.raises(NotFound):
            await dispatch(create_agent(model="x/y"), id="one", input="hello")
        with pytest.raises(InvalidOption):
            await dispatch("echo", id="../one", input="hello")
        with pytest.raises(InvalidOption):
            await dispatch("echo", id="one", input="  ")


async def test_files_are_reloaded_while_work_runs(folder: Path) -> None:
    asgi = create_app(folder, strict=False)
    async with serve_asgi(asgi) as site:
        running = (await site.send("echo/one", "wait go")).body["submission_id"]
        await site.wait_until_running(running)
        project(
            folder, agents__echo=ECHO.replace("echo: ", "reloaded: "), workflows__add="broken(\n"
        )
        faults = app_of(asgi).reload().faults
        assert [file.name for file in faults] == ["add.py"]
        (folder / "go").touch()
        assert (await site.outcome(running))["result"]["text"] == "echo: wait go"
        done = await site.send("echo/one?wait=result", "hello")
        assert done.body["result"]["text"] == "reloaded: hello"
        project(folder, workflows__add=ADD)
        assert not app_of(asgi).reload().faults
        assert (await site.post("/workflows/add?wait=result", [1])).body["result"] == {"sum": 1}
