"""`smokebox init`, `dev` and `app`: from an empty folder to a service."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from typing import TYPE_CHECKING

import pytest

from background_server import stop_server
from cli.command_line import wait_until
from cli.served_project import TIMEOUT, environment, run_project
from smokebox.testing import FakeModelServer

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Run

pytestmark = pytest.mark.timeout(120)
ME = "/agents/assistant/me?wait=result"
SLOW = """
from smokebox import create_agent
from smokebox.testing import ScriptedModel, Turn

agent = create_agent(model=ScriptedModel(then=Turn("Slow, but here.", delay=1)))
"""
STUBBORN = """
import asyncio, pathlib

async def run(ctx):
    pathlib.Path("started").touch()
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""
SITE = """
import contextlib
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

started = False

@contextlib.asynccontextmanager
async def lifespan(app):
    global started
    started = True
    yield

def word(request):
    return JSONResponse({"word": "WORD", "started": started})

app = Starlette(routes=[Route("/word", word)], lifespan=lifespan)
"""

WORD = """
from smokebox import get_sandbox

async def run(ctx):
    async with get_sandbox(ctx.env.PyBox, ctx.payload["id"]) as sandbox:
        return (await sandbox.exec("cat /word")).stdout
"""


@pytest.fixture
def demo(run: Run, tmp_path: Path) -> Path:
    """Create a project with `smokebox init`."""
    assert run("init", "demo").returncode == 0
    return tmp_path / "demo"


def test_init_writes_a_project_and_prints_the_next_step(run: Run, tmp_path: Path) -> None:
    done = run("init", "demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Next: cd demo && smokebox dev" in done.stdout
    ignored = (tmp_path / "demo" / ".gitignore").read_text().splitlines()
    assert {".smokebox/", ".env"} <= set(ignored)
    for file in ("smokebox.toml", "agents/assistant.py", "workflows/review.py", ".env.example"):
        assert (tmp_path / "demo" / file).is_file()


def test_init_overwrites_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "smokebox.toml").write_text("mine")
    done = run("init")
    assert done.returncode == 1
    assert "already has smokebox.toml" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["smokebox.toml"]
    assert (tmp_path / "smokebox.toml").read_text() == "mine"


def test_tests_of_a_new_project_pass(demo: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q"]
    # Also with an API key set: tests use no provider.
    env = environment(demo, ANTHROPIC_API_KEY="invalid")
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        command, cwd=demo, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_new_project_answers_without_an_api_key(demo: Path) -> None:
    with run_project(demo, "dev") as dev:
        assert "You said 'Hello'" in dev.request(ME, {"message": "Hello"})["result"]["text"]
        done = dev.request("/workflows/review?wait=result", {"document": "# Plan"})
        assert done["result"]["review"]
        dev.expect(r"── assistant/me\n(?s:.*)> Hello\nYou said 'Hello'")
        dev.expect(r"── workflows/review \w+\n  started attempt=1\n")
        dev.expect(r"● write review.md")
        dev.expect(r"  completed result=")
        for line in (f"curl '{dev.url}{ME}' -d", "POST /agents/assistant/{id}"):
            assert line in dev.output
        assert dev.stop() == 0
        assert "Traceback" not in dev.output


def test_provider_is_used_once_a_key_is_set(demo: Path) -> None:
    with FakeModelServer("I am the provider.") as provider, run_project(demo, "dev") as dev:
        assert "You said 'Hello'" in dev.request(ME, {"message": "Hello"})["result"]["text"]
        with (demo / "smokebox.toml").open("a") as settings:
            settings.write(f'[models.anthropic]\nbase_url = "{provider.url}"\n')
        dev.expect(r"smokebox.toml changed\n  POST")
        (demo / ".env").write_text(f"ANTHROPIC_API_KEY={provider.api_key}\n")
        dev.expect(r"\.env changed\n  POST")
        # A provider's libraries take long to import on a busy machine.
        result = dev.request(ME, {"message": "Hello"}, timeout=60)["result"]
        assert (result["text"], result["model"]) == (
            "I am the provider.",
            "anthropic/claude-sonnet-4-6",
        )
        (received,) = provider.received
        assert received.path == "/v1/messages"
        assert received.body["model"] == "claude-sonnet-4-6"


def test_changed_files_are_reloaded_and_conversations_continue(demo: Path) -> None:
    with run_project(demo, "dev") as dev:
        dev.request(ME, {"message": "one"})
        helper = demo / "model.py"
        helper.write_text(helper.read_text().replace("You said", "You wrote"))
        dev.expect(r"model.py changed\n  POST")
        assert "You wrote 'two'" in dev.request(ME, {"message": "two"})["result"]["text"]
        messages = [
            event
            for event in dev.request("/agents/assistant/me")["events"]
            if event["type"] == "message_added"
        ]
        assert len(messages) == 2


def test_file_with_an_error_is_reported_and_others_are_served(demo: Path) -> None:
    (demo / "agents" / "broken.py").write_text("import os\n1 / 0\n")
    with run_project(demo, "dev") as dev:
        dev.expect(r"broken.py, line 2: ZeroDivisionError")
        assert dev.request(ME, {"message": "Hello"})["outcome"] == "completed"
        refused = dev.request("/agents/broken/me", {"message": "Hello"})
        assert "broken.py, line 2" in refused["error"]["message"]

        (demo / "smokebox.toml").write_text("[app]\nidle = 'soon'\n")
        dev.expect(r"smokebox.toml: \[app\]: idle must be seconds")
        assert dev.request(ME, {"message": "Hello"})["outcome"] == "completed"


def test_agent_does_not_shadow_a_module_of_its_name(demo: Path) -> None:
    (demo / "agents" / "colorsys.py").write_text(SLOW)
    (demo / "workflows" / "mix.py").write_text(
        "async def run(ctx):\n    import colorsys\n    return colorsys.rgb_to_hsv(1, 1, 1)\n"
    )
    with run_project(demo, "app") as app:
        assert app.request("/workflows/mix?wait=result", {})["result"] == [0.0, 0.0, 1]


def test_recreated_conversation_is_shown_from_its_start(demo: Path) -> None:
    with run_project(demo, "dev") as dev:
        dev.request(ME, {"message": "one"})
        dev.expect(r"> one\n(?s:.*)completed")
        request = urllib.request.Request(f"{dev.url}/agents/assistant/me", method="DELETE")
        urllib.request.urlopen(request).close()
        dev.request(ME, {"message": "two"})
        dev.expect(r"> two\n(?s:.*)completed")


def test_early_failures_and_handler_logs_are_shown(demo: Path) -> None:
    (demo / "agents" / "lost.py").write_text(
        "from smokebox import create_agent\nagent = create_agent(model='nosuch/model')\n"
    )
    (demo / "agents" / "hook.py").write_text(
        'triggers = {"webhook": True}\n'
        "async def handler(ctx):\n    ctx.log.warning('came in', what=ctx.payload)\n"
    )
    with run_project(demo, "dev") as dev:
        assert (
            dev.request("/agents/lost/me?wait=result", {"message": "Hello"})["outcome"] == "failed"
        )
        dev.expect(r"── lost/me\n  failed: there is no model provider 'nosuch'")
        dev.request("/agents/hook/t-1?wait=result", [1])
        dev.expect(r"── hook/t-1\n  started attempt=1\n  came in what=\[1\]\n  completed")


def test_custom_routes_are_served_and_reloaded(demo: Path) -> None:
    site = SITE.replace("WORD", "one")
    (demo / "app.py").write_text(site)
    with run_project(demo, "dev") as dev:
        assert dev.request("/word") == {"word": "one", "started": True}
        assert dev.request(ME, {"message": "Hello"})["outcome"] == "completed"
        (demo / "app.py").write_text(SITE.replace("WORD", "two"))
        dev.expect(r"app.py changed\n  POST")
        assert dev.request("/word")["word"] == "two"


def test_foreign_pages_cannot_call_an_app_without_keys(demo: Path) -> None:
    with run_project(demo, "dev") as dev:
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            refused = dev.request(ME, {"message": "Hello"}, headers=headers)
            assert refused["error"]["code"] == "forbidden"
        assert (
            dev.request(ME, {"message": "Hello"}, headers={"Origin": dev.url})["outcome"]
            == "completed"
        )


def test_env_option_sets_variables_from_a_file(demo: Path) -> None:
    (demo.parent / "other.env").write_text("SMOKEBOX_APP_KEYS=one,two\n")
    with run_project(demo.parent, "dev", "demo", "--env", "other.env") as dev:
        assert dev.request(ME, {"message": "Hello"})["error"]["code"] == "unauthorized"
        for key in ("one", "two"):
            done = dev.request(ME, {"message": "Hello"}, headers={"Authorization": f"Bearer {key}"})
            assert done["outcome"] == "completed"


def test_production_refuses_a_project_with_an_error(run: Run, demo: Path) -> None:
    (demo / "workflows" / "late.py").write_text(
        'schedule = "every day"\nasync def run(ctx): pass\n'
    )
    done = run("app", "demo")
    assert done.returncode == 2
    assert "late.py" in done.stderr and "schedule must be a cron expression" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_production_serves_other_machines_only_with_keys(demo: Path, host: str) -> None:
    header = {"Authorization": "Bearer secret"}
    with run_project(demo, "app", "--host", host) as app:
        assert app.request("/agents")["error"]["code"] == "unauthorized"
        app.expect("smokebox keys create")
    with run_project(demo, "app", "--host", host, "--no-keys") as app:
        assert app.request("/agents")["agents"]
    with run_project(demo, "app", "--host", host, SMOKEBOX_APP_KEYS="secret") as app:
        assert app.request("/agents")["error"]["code"] == "unauthorized"
        assert app.request("/agents", headers=header)["agents"]


def test_removed_option_names_what_to_use(run: Run, demo: Path) -> None:
    done = run("app", "demo", "--open")
    assert (done.returncode, "--no-keys" in done.stderr) == (2, True)


def test_signal_lets_running_work_finish(demo: Path) -> None:
    (demo / "agents" / "slow.py").write_text(SLOW)
    responses = []
    with run_project(demo, "app") as app:

        def send() -> None:
            responses.append(app.request("/agents/slow/me?wait=result", {"message": "Hello"}))

        sender = threading.Thread(target=send)
        sender.start()
        wait_until(lambda: app.request("/agents/slow")["conversations"])
        assert app.stop() == 0
        sender.join()
    assert responses[0]["result"]["text"] == "Slow, but here."
    assert "Traceback" not in app.output


def test_work_cut_off_by_grace_resumes_at_the_next_start(demo: Path) -> None:
    (demo / "agents" / "slow.py").write_text(SLOW)
    responses = []
    with run_project(demo, "app", "--grace", "0") as app:

        def send() -> None:
            responses.append(app.request("/agents/slow/me?wait=result", {"message": "Hello"}))

        sender = threading.Thread(target=send)
        sender.start()
        wait_until(lambda: app.request("/agents/slow")["conversations"])
        assert app.stop() == 0
        sender.join()
        assert responses[0]["error"]["code"] == "service_unavailable"
    with run_project(demo, "app") as app:
        wait_until(lambda: app.request("/health")["open"] == 0)
        text = json.dumps(app.request("/agents/slow/me"))
    assert text.count("Slow, but here.") >= 1


def test_work_that_ignores_cancellation_does_not_block_exit(demo: Path) -> None:
    (demo / "workflows" / "stubborn.py").write_text(STUBBORN)
    with run_project(demo, "app", "--grace", "0") as app:
        app.request("/workflows/stubborn", {})
        wait_until(lambda: (demo / "started").exists())
        assert app.stop() == 0
        assert "abandoned work" in app.output


def test_stream_ends_when_the_app_stops(demo: Path) -> None:
    with run_project(demo, "app") as app:
        app.request(ME, {"message": "Hello"})
        request = urllib.request.Request(
            f"{app.url}/agents/assistant/me", headers={"accept": "text/event-stream"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as stream:
            assert any(b"work_ended" in line for line in stream)
            app.process.terminate()
            # A connection that was cut off would raise.
            stream.read()
        assert app.process.wait(TIMEOUT) == 0
    assert app.output.count("\n") == 1


def test_state_directory_is_an_option(demo: Path, tmp_path: Path) -> None:
    with run_project(demo, "app", "--state", str(tmp_path / "state")) as app:
        app.request(ME, {"message": "Hello"})
    assert (tmp_path / "state" / "conversations.db").is_file()
    assert not (demo / ".smokebox").exists()


def test_port_in_use_is_an_error_with_a_hint(run: Run, demo: Path) -> None:
    with run_project(demo, "app") as app:
        done = run("app", "demo", "--port", app.url.rpartition(":")[2])
    assert done.returncode == 1
    assert "cannot listen on" in done.stderr and "--port" in done.stderr


def test_dev_builds_images_of_bindings_and_again_what_changes(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    dockerfile = tmp_path / "docker" / "py.Dockerfile"
    dockerfile.write_text("FROM host\nRUN echo first > /word && cat /word\n")
    (tmp_path / "smokebox.toml").write_text(
        '[sandboxes.PyBox]\nimage = "./docker/py.Dockerfile"\n[sandboxes.Plain]\nimage = "host"\n'
    )
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "word.py").write_text(WORD)
    try:
        with run_project(tmp_path, "dev") as dev:
            dev.expect(r"building the image of PyBox\n(?s:.*)  first\n(?s:.*)built in")
            body = {"id": "one"}
            assert dev.request("/workflows/word?wait=result", body)["result"] == "first\n"
            assert "building the image of Plain" not in dev.output
            dockerfile.write_text("FROM host\nRUN exit 3\n")
            dev.expect(r"py.Dockerfile:2: `RUN exit 3`: ended with exit code 3")
            dockerfile.write_text("FROM host\nRUN echo second > /word && cat /word\n")
            dev.expect(r"  second\n(?s:.*)built in")
            body = {"id": "two"}
            assert dev.request("/workflows/word?wait=result", body)["result"] == "second\n"
            assert dev.stop() == 0
            assert "Traceback" not in dev.output
    finally:
        stop_server(tmp_path / ".home")
