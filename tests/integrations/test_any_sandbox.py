"""The adapters over a sandbox without processes and with a persistent shell."""

from __future__ import annotations

from smokebox import virtual
from smokebox.integrations.deepagents import SmokeboxBackend
from smokebox.integrations.inspect import SmokeboxConfig, SmokeboxEnvironment
from smokebox.integrations.pydantic_ai import SmokeboxWorkspace

FILES = {"/workspace/src/a.py": "import b\n", "/workspace/notes.md": "import nothing\n"}


def test_deep_agent_reads_searches_and_writes_in_memory() -> None:
    with SmokeboxBackend(virtual(files=FILES)) as backend:
        assert [m["path"] for m in backend.glob("*.py").matches or []] == ["/workspace/src/a.py"]
        assert backend.grep("import", glob="*.py").matches == [
            {"path": "/workspace/src/a.py", "line": 1, "text": "import b"}
        ]
        assert backend.edit("/workspace/src/a.py", "b", "c").occurrences == 1
        assert backend.execute("cat src/a.py; exit 3").output == "import c\n"


def test_deep_agent_sees_a_timeout_in_memory() -> None:
    with SmokeboxBackend(virtual()) as backend:
        result = backend.execute("while :; do :; done", timeout=1)
        assert result.exit_code == 124
        assert "timed out" in result.output


async def test_sample_in_memory_starts_each_command_in_its_directory() -> None:
    config = SmokeboxConfig(sandbox="virtual", env={"COLOUR": "blue"})
    environments = await SmokeboxEnvironment.sample_init("task", config, {})
    environment = environments["default"]
    await environment.exec(["bash", "-c", "cd / && COLOUR=red"])
    result = await environment.exec(["bash", "-c", "pwd; echo $COLOUR"])
    await SmokeboxEnvironment.sample_cleanup("task", config, environments, False)
    assert result.stdout == "/workspace\nblue\n"


async def test_workspace_in_memory_starts_each_command_at_its_root() -> None:
    async with virtual(files=FILES) as sandbox:
        workspace = SmokeboxWorkspace(sandbox)
        await workspace.run("cd /; argv=mine", shell=True)
        assert (await workspace.run(["pwd"])).stdout == "/workspace\n"
        assert (await workspace.run("echo $argv", shell=True)).stdout == "mine\n"


async def test_workspace_in_memory_follows_links() -> None:
    async with virtual(files=FILES) as sandbox:
        workspace = SmokeboxWorkspace(sandbox)
        await workspace.run("ln -s src link; ln -s loop loop", shell=True)
        assert await workspace.realpath("/workspace/link/../x") == "/workspace/x"
        assert await workspace.realpath("/workspace/link/new") == "/workspace/src/new"
        assert [entry.name for entry in await workspace.list_dir("/workspace/link")] == ["a.py"]


async def test_two_workspaces_in_memory_have_different_refs() -> None:
    async with virtual() as first, virtual() as second:
        workspaces = [SmokeboxWorkspace(first), SmokeboxWorkspace(second)]
        for workspace in workspaces:
            await workspace.working_dir()
        assert workspaces[0].ref != workspaces[1].ref
