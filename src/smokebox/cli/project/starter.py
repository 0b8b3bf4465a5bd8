"""The files of a new project."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from smokebox import __version__
from smokebox.errors import Conflict

if TYPE_CHECKING:
    from pathlib import Path

_SETTINGS = """\
# How the app is served, and what its agents may use.
[app]
retention = "30d"  # for how long conversations and runs are kept
"""

_PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["smokebox[models]>={version}"]

[dependency-groups]
dev = ["pytest"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""

_MODEL = '''\
"""Which model the agents have: a real one as soon as its key is set, until then a script."""

from smokebox import env
from smokebox.agents.models import open_model
from smokebox.errors import ModelRefused
from smokebox.testing import ScriptedModel, call, last_returns, last_text

NAME = env.get("MODEL") or "anthropic/claude-sonnet-4-6"


def script(request):
    """What answers without a key: it does what the two examples ask for."""
    if last_returns(request):
        return "I wrote review.md."
    said = last_text(request)
    if "review.md" in said:
        return call("write", path="review.md", content="It is short. That is good.\\n")
    return f"You said {said!r}. With a key in .env, {NAME} answers in my place."


def has_key():
    try:
        open_model(NAME)
    except ModelRefused:
        return False
    return True


model = NAME if NAME != "scripted" and has_key() else ScriptedModel(then=script)
'''

_AGENT = '''\
"""Talk to it: POST /agents/assistant/{id}. Each id is a conversation of its own."""

from model import model
from smokebox import create_agent

agent = create_agent(
    model=model,
    instructions="You are a helpful assistant. Answer briefly.",
    description="Answers questions.",
)
'''

_WORKFLOW = '''\
"""Have it done: POST /workflows/review, with {"document": "..."}."""

from model import model
from smokebox import create_agent

reviewer = create_agent(name="reviewer", model=model, cwd="/workspace")


async def run(ctx):
    harness = await ctx.init(reviewer)
    await harness.fs.write_file("document.md", ctx.payload["document"])
    session = await harness.session()
    await session.prompt("Review document.md and write your findings to review.md.")
    return {"review": await harness.fs.read_file("review.md")}
'''

_TEST = '''\
"""The project as its users see it, without a key: python -m pytest."""

import os
from pathlib import Path

import pytest

os.environ["MODEL"] = "scripted"

from smokebox.sync import AgentClient
from smokebox.testing import served

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def client():
    with served(ROOT) as url, AgentClient(url) as client:
        yield client


def test_the_assistant_answers(client):
    assert "Hello" in str(client.ask("assistant", "me", "Hello"))


def test_the_workflow_reviews_a_document(client):
    run = client.run("review", {"document": "# Plan"})
    assert run.wait().result["review"]
'''

_ENV = """\
# Copy this file to .env, which git does not see, and set what you have.
ANTHROPIC_API_KEY=
# Another model than anthropic/claude-sonnet-4-6, as provider/model:
# MODEL=openai/gpt-5
# Who may ask, where other machines can: keys with commas between them.
# SMOKEBOX_APP_KEYS=
"""

_IGNORED = """\
.env
.smokebox/
.venv/
__pycache__/
dist/
"""


def write_starter(folder: Path) -> list[str]:
    """Make a project there; gives the names of its files. Raises `Conflict` rather than write
    over one."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-") or "app"
    files = {
        "smokebox.toml": _SETTINGS,
        "pyproject.toml": _PYPROJECT.format(name=name, version=__version__),
        "model.py": _MODEL,
        "agents/assistant.py": _AGENT,
        "workflows/review.py": _WORKFLOW,
        "tests/test_project.py": _TEST,
        ".env.example": _ENV,
        ".gitignore": _IGNORED,
    }
    taken = [file for file in files if (folder / file).exists()]
    if taken:
        raise Conflict(
            f"{folder} has {', '.join(taken)} already.",
            hint="Pass the name of a folder that is new: smokebox init NAME.",
            kind="file",
            name=taken[0],
        )
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x": what appeared a moment ago is not written over, either.
        with path.open("x") as to:
            to.write(text)
    return list(files)
