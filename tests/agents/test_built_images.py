"""Agents in sandboxes whose image is built first, and tools that build images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from client.server_process import ServerProcess, server_process
from smokebox import connect, create_agent, get_sandbox, init
from smokebox.errors import BuildFailed
from smokebox.testing import ScriptedModel, call, last_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server."""
    with server_process(str(tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture
def project(tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a project with a binding whose image is built."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "smokebox.toml").write_text('[sandboxes.PyBox]\nimage = "./docker"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMOKEBOX_URL", server.url)
    return tmp_path


@create_agent
def coder(ctx: Any) -> dict[str, Any]:
    """Work in the sandbox of a binding."""
    model = ScriptedModel(call("bash", command="cat /made"), last_text)
    return {"model": model, "sandbox": get_sandbox(ctx.env.PyBox, ctx.id), "cwd": "/workspace"}


async def test_an_agent_works_in_an_image_that_its_binding_builds(project: Path) -> None:
    (project / "docker" / "Dockerfile").write_text("FROM host\nRUN echo made > /made\n")
    async with init(coder, id="one") as harness:
        assert str(await (await harness.session()).prompt("What is made?")).strip() == "made"
    async with connect() as client:
        await client.sandbox("one").destroy()


async def test_an_image_that_cannot_be_built_ends_the_work_of_its_agent(project: Path) -> None:
    (project / "docker" / "Dockerfile").write_text("FROM host\nRUN echo told; exit 3\n")
    with pytest.raises(BuildFailed, match="Dockerfile:2") as caught:
        async with init(coder, id="two") as harness:
            await (await harness.session()).prompt("What is made?")
    assert caught.value.output == "told\n"


async def test_a_tool_builds_an_image_and_shows_the_model_why_it_fails(project: Path) -> None:
    async def try_image(dockerfile: str) -> str:
        """Build an image, and return its file /made."""
        (project / "docker" / "Dockerfile").write_text(dockerfile)
        async with connect() as client, await client.create(image="./docker") as sandbox:
            return (await sandbox.exec("cat /made")).stdout

    seen: list[str] = []

    def look(request: Any) -> Any:
        seen.append(last_text(request))
        return call("try_image", dockerfile="FROM host\nRUN echo second > /made\n")

    first = call("try_image", dockerfile="FROM host\nRUN echo 'no compiler' >&2; exit 7\n")
    model = ScriptedModel(first, look, last_text)
    async with init(create_agent(model=model, tools=[try_image])) as harness:
        assert str(await (await harness.session()).prompt("Build it.")).strip() == "second"
    assert "Dockerfile:2: `RUN echo 'no compiler' >&2; exit 7`: ended with exit code 7" in seen[0]
    assert seen[0].endswith("no compiler")
