"""Tests of the agents in the seed documents, with scripted models and everything else real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from client.server_process import server_process
from client.upstream import upstream
from smokebox import (
    Egress,
    Sandbox,
    create_agent,
    env,
    get_sandbox,
    get_virtual_sandbox,
    init,
    local,
)
from smokebox.testing import ScriptedModel, call, last_returns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from client.server_process import ServerProcess
    from smokebox.agents import Reply
    from smokebox.agents.model import ModelRequest
    from smokebox.egress import Request

# A server and its first sandbox take seconds on a busy machine.
pytestmark = pytest.mark.timeout(120)

PROJECT = """
[sandboxes.Sandbox]
[sandboxes.PyBox]
image = "host"
limits = "lite"
[sandboxes.NodeBox]
image = "host"
[buckets.KNOWLEDGE_BASE]
url = "file://{folder}"
"""
TOKEN = "gh-token-that-must-stay-outside"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(str(tmp_path_factory.mktemp("seeds"))) as server:
        yield server


@pytest.fixture
def project(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project like that of the seeds, with sandboxes of a real server."""
    knowledge = tmp_path / "knowledge"
    knowledge.mkdir()
    (tmp_path / "smokebox.toml").write_text(PROJECT.format(folder=knowledge))
    (tmp_path / ".env").write_text(f"GITHUB_TOKEN={TOKEN}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMOKEBOX_URL", server.url)
    return tmp_path


def tool_result(request: ModelRequest) -> str:
    return last_returns(request)[0].text


def context(**fields: Any) -> SimpleNamespace:
    """Return the context of a workflow."""
    return SimpleNamespace(init=init, env=env, **fields)


async def test_agent_works_in_the_linux_sandbox_of_its_id(project: Path) -> None:
    model = ScriptedModel(
        call("bash", command="uname -s > kernel; pwd; cat kernel"),
        then=lambda request: tool_result(request),
    )

    @create_agent
    def coder(ctx: Any) -> dict[str, Any]:
        return dict(model=model, sandbox=get_sandbox(ctx.env.Sandbox, ctx.id), cwd="/workspace")

    async with init(coder, id="user-42") as harness:
        reply = await (await harness.session()).prompt("Which kernel is it?")
        assert reply.text.splitlines()[:2] == ["/workspace", "Linux"]
    # The sandbox outlives the agent.
    sandbox = get_sandbox(env.Sandbox, "user-42")
    assert await sandbox.read_file("/workspace/kernel") == "Linux\n"
    await sandbox.destroy()


async def test_handler_prompts_with_its_payload(project: Path) -> None:
    async def handle(ctx: Any) -> Reply[Any]:
        sandbox = get_sandbox(ctx.env.Sandbox, ctx.id)
        harness = await ctx.init(
            sandbox=sandbox,
            model=ScriptedModel(call("bash", command="echo $((40 + 2))"), then=tool_result),
        )
        session = await harness.session()
        reply: Reply[Any] = await session.prompt(ctx.payload["message"])
        await harness.aclose()
        await sandbox.destroy()
        return reply

    reply = await handle(context(id="ticket-7", payload={"message": "What is 40 + 2?"}))
    assert reply.text == "42"


async def test_agents_use_different_bindings(project: Path) -> None:
    for kind, command in (("PyBox", "python3 -c 'print(6 * 7)'"), ("NodeBox", "echo 42")):
        sandbox = get_sandbox(getattr(env, kind), f"one-{kind.lower()}")
        model = ScriptedModel(call("bash", command=command), then=tool_result)
        async with init(model=model, sandbox=sandbox) as harness:
            assert (await (await harness.session()).prompt("Compute.")).text == "42"
        await sandbox.destroy()


async def test_token_is_added_outside_the_sandbox(project: Path) -> None:
    def add_github_token(request: Request, env: Any, context: Any) -> Request:
        request.headers["authorization"] = f"Bearer {env.GITHUB_TOKEN}"
        return request

    class GitHubSandbox(Sandbox):
        outbound_by_host: ClassVar = {"api.github.com": add_github_token}

    async with upstream() as github:
        hosts = {"api.github.com": github.address}
        sandbox = get_sandbox(GitHubSandbox, "issue-bot", egress=Egress(hosts=hosts))
        model = ScriptedModel(
            call("bash", command="curl -s -o /dev/null -w %{http_code} http://api.github.com/user"),
            call(
                "bash",
                command=f"env | grep -c {TOKEN};"
                f" cat /proc/*/environ 2>/dev/null | grep -ac {TOKEN}",
            ),
            then="Done.",
        )
        async with init(model=model, sandbox=sandbox) as harness:
            await (await harness.session()).prompt("Who am I?")
        await sandbox.destroy()
    ((_, path, headers),) = github.requests
    assert (path, headers["authorization"]) == ("/user", f"Bearer {TOKEN}")
    assert tool_result(model.requests[1]).startswith("200")
    assert tool_result(model.requests[2]).split()[:2] == ["0", "0"]


async def test_agent_searches_a_bucket(project: Path) -> None:
    article = project / "knowledge" / "billing" / "refunds.md"
    article.parent.mkdir()
    article.write_text("# Refunds\nA refund takes five days.\n")

    async def handle(ctx: Any) -> Reply[Any]:
        sandbox = await get_virtual_sandbox(ctx.env.KNOWLEDGE_BASE)
        model = ScriptedModel(
            [call("glob", pattern="**/*.md"), call("grep", pattern="(?i)refund takes")],
            then=all_results,
        )
        harness = await ctx.init(sandbox=sandbox, model=model)
        session = await harness.session()
        reply: Reply[Any] = await session.prompt(
            f"Search the knowledge base and answer: {ctx.payload['message']}"
        )
        await harness.aclose()
        await sandbox.aclose()
        return reply

    def all_results(request: ModelRequest) -> str:
        return " | ".join(back.text for back in last_returns(request))

    reply = await handle(context(id="q-1", payload={"message": "How long does a refund take?"}))
    assert reply.text == "billing/refunds.md | billing/refunds.md:2:A refund takes five days."


async def test_workflow_stages_a_document_and_reads_the_review() -> None:
    reviewer = create_agent(
        model=ScriptedModel(
            call("read", path="document.md"),
            lambda request: call(
                "write", path="review.md", content=f"Read: {tool_result(request)}"
            ),
            "Done.",
        ),
        cwd="/workspace",
    )

    async def run(ctx: Any) -> dict[str, str]:
        harness = await ctx.init(reviewer)
        await harness.fs.write_file("document.md", ctx.payload["document"])
        session = await harness.session()
        await session.prompt("Review document.md and write your findings to review.md.")
        return {"review": await harness.fs.read_file("review.md")}

    result = await run(context(payload={"document": "We will ship.\n"}))
    assert "We will ship." in result["review"]


async def test_agent_works_in_a_local_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "hidden")
    (tmp_path / "catalog.py").write_text("items = []\n")
    model = ScriptedModel(
        call("bash", command='pwd; ls; echo "[$SECRET_OF_THE_HOST] [$GIVEN]"'), then=tool_result
    )
    catalog = create_agent(
        model=model,
        sandbox=local(env={"GIVEN": "shown"}),
        cwd=str(tmp_path),
        instructions="Inspect the requested change and run only relevant validation.",
    )
    async with init(catalog) as harness:
        reply = await (await harness.session()).prompt("What is there?")
    assert reply.text.splitlines() == [str(tmp_path), "catalog.py", "[] [shown]"]
    assert "run only relevant validation" in model.requests[0].system


async def test_stored_conversation_does_not_keep_files() -> None:
    writer = create_agent(
        name="writer", model=ScriptedModel(call("write", path="a.txt", content="x"), "Written.")
    )
    async with init(writer, id="ada") as harness:
        await (await harness.session()).prompt("Write a.txt.")
        assert await harness.fs.exists("a.txt")
    again = create_agent(name="writer", model=ScriptedModel("Nothing."))
    async with init(again, id="ada") as harness:
        assert len(await (await harness.session()).messages()) == 4
        assert not await harness.fs.exists("a.txt")


async def test_stored_files_do_not_keep_the_conversation(project: Path) -> None:
    sandbox = get_sandbox(env.Sandbox, "shared")
    model = ScriptedModel(call("write", path="a.txt", content="x"), "Written.")
    async with init(model=model, sandbox=sandbox) as harness:
        await (await harness.session()).prompt("Write a.txt.")
    async with init(model=ScriptedModel("?"), sandbox=sandbox) as harness:
        assert await (await harness.session()).messages() == []
        assert await harness.fs.read_file("a.txt") == "x"
    await sandbox.destroy()
