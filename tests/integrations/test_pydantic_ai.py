"""Pydantic AI's test suite for workspace backends, and cases that it lacks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest
import pytest_asyncio
from pydantic_ai import Agent, ModelMessage, ModelResponse, RunContext, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import (
    WorkspaceBackend,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from integrations.sandboxes import find_linux
from smokebox import SandboxApi, local
from smokebox.errors import InvalidOption
from smokebox.integrations.pydantic_ai import SmokeboxWorkspace

if TYPE_CHECKING:
    from integrations.sandboxes import MakeSandbox

MakeBackend: TypeAlias = Callable[[], WorkspaceBackend]


def kind_and_name(ref: WorkspaceRef | None) -> tuple[str, str]:
    """Return the kind of a sandbox, and its id or its directory."""
    assert ref is not None
    kind, _, name = ref.id.partition(":")
    return kind, name


class TestPydanticAISuite(WorkspaceBackendSuite):
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest_asyncio.fixture
    async def sandboxes(self) -> AsyncIterator[list[SandboxApi]]:
        created: list[SandboxApi] = []
        yield created
        for sandbox in created:
            await sandbox.aclose()

    @pytest.fixture
    def fresh_backend(
        self,
        sandboxes: list[SandboxApi],
        make_sandbox: MakeSandbox,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> MakeBackend:
        def make() -> SandboxApi:
            sandboxes.append(make_sandbox(tmp_path_factory.mktemp("workspace")))
            return sandboxes[-1]

        return lambda: SmokeboxWorkspace(make)

    @pytest.fixture
    def backend(self, fresh_backend: MakeBackend) -> WorkspaceBackend:
        return fresh_backend()

    @pytest.fixture
    def attach_backend(
        self, sandboxes: list[SandboxApi], make_sandbox: MakeSandbox
    ) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        def attach(ref: WorkspaceRef) -> WorkspaceBackend:
            kind, name = kind_and_name(ref)

            async def make() -> SandboxApi:
                linux = kind == "linux"
                found = await find_linux(make_sandbox, name) if linux else make_sandbox(Path(name))
                sandboxes.append(found)
                return sandboxes[-1]

            return SmokeboxWorkspace(make, ref=ref)

        return attach

    @pytest.fixture
    def destroy_environment(
        self, make_sandbox: MakeSandbox
    ) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        async def destroy(backend: WorkspaceBackend) -> None:
            kind, name = kind_and_name(backend.ref)
            if kind == "linux":
                await (await find_linux(make_sandbox, name)).destroy()
            else:
                shutil.rmtree(name)

        return destroy


@pytest_asyncio.fixture
async def workspace(make_sandbox: MakeSandbox, tmp_path: Path) -> AsyncIterator[SmokeboxWorkspace]:
    sandbox = make_sandbox(tmp_path)
    yield SmokeboxWorkspace(sandbox)
    await sandbox.aclose()


async def test_exit_code_of_124_is_not_a_timeout(workspace: SmokeboxWorkspace) -> None:
    result = await workspace.run("exit 124", shell=True, timeout=30)
    assert result.exit_code == 124


async def test_timeout_keeps_partial_output(workspace: SmokeboxWorkspace) -> None:
    with pytest.raises(WorkspaceTimeoutError) as caught:
        await workspace.run("echo out; echo err >&2; sleep 60", shell=True, timeout=0.5)
    assert caught.value.stdout == "out\n"
    assert caught.value.stderr.startswith("err\n")


async def test_endless_output_is_an_error_with_the_first_part(
    workspace: SmokeboxWorkspace,
) -> None:
    with pytest.raises(WorkspaceOutputLimitError) as caught:
        await workspace.run(["yes"])
    assert caught.value.stdout.startswith("y\ny\n")
    assert len(caught.value.stdout) <= 64 * 1024


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
async def test_invalid_timeout_is_refused(workspace: SmokeboxWorkspace, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await workspace.run(["true"], timeout=timeout)


async def test_name_that_is_not_utf8_is_listed(workspace: SmokeboxWorkspace) -> None:
    await workspace.run(r"touch $'a\xff' b", shell=True)
    entries = await workspace.list_dir(await workspace.working_dir())
    assert [entry.name for entry in entries] == ["a\\xff", "b"]


async def test_factory_is_called_once(tmp_path: Path) -> None:
    calls = []

    async def make() -> SandboxApi:
        await asyncio.sleep(0.01)
        calls.append(local(cwd=tmp_path))
        return calls[-1]

    workspace = SmokeboxWorkspace(make)
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(workspace.working_dir())
    assert len(calls) == 1
    await calls[0].aclose()


async def test_cancelled_caller_does_not_lose_the_sandbox(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def make() -> SandboxApi:
        await release.wait()
        return local(cwd=tmp_path)

    workspace = SmokeboxWorkspace(make)
    first = asyncio.create_task(workspace.working_dir())
    await asyncio.sleep(0)
    first.cancel()
    release.set()
    assert await workspace.working_dir() == str(tmp_path)


async def test_failed_creation_is_retried(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    workspace = SmokeboxWorkspace(lambda: local(cwd=folder))
    with pytest.raises(WorkspaceUnavailableError):
        await workspace.working_dir()
    folder.mkdir()
    assert await workspace.working_dir() == str(folder)


async def test_closed_sandbox_is_unavailable(tmp_path: Path) -> None:
    sandbox = local(cwd=tmp_path)
    workspace = SmokeboxWorkspace(sandbox)
    await workspace.working_dir()
    await sandbox.aclose()
    with pytest.raises(WorkspaceUnavailableError):
        await workspace.run(["true"])


def test_object_that_is_not_a_sandbox_is_refused() -> None:
    with pytest.raises(InvalidOption, match="a sandbox or a function"):
        SmokeboxWorkspace("local")  # type: ignore[arg-type]


async def test_agent_works_in_it(workspace: SmokeboxWorkspace) -> None:
    def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if len(messages) == 1:
            return ModelResponse(parts=[ToolCallPart("sh", {"command": "echo hi | tee note"})])
        return ModelResponse(parts=[TextPart("done")])

    agent = Agent(FunctionModel(script))

    @agent.tool
    async def sh(ctx: RunContext[object], command: str) -> str:
        return (await ctx.workspace.run(command, shell=True)).stdout

    result = await agent.run("write a note", workspace=workspace)
    root = await workspace.working_dir()
    assert (result.output, await workspace.read_bytes(f"{root}/note")) == ("done", b"hi\n")
