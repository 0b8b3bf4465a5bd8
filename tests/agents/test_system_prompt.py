"""Tests of the system prompt: instructions, AGENTS.md, workspace and skills."""

from __future__ import annotations

from smokebox import virtual
from smokebox.agents.skills import Skill
from smokebox.agents.system_prompt import MAX_PROJECT_BYTES, system_prompt


async def test_prompt_has_all_parts_in_order() -> None:
    skill = Skill(name="review", description="Reviews\n changes.", instructions="x")
    async with virtual() as sandbox:
        await sandbox.write_file("AGENTS.md", "Use tabs.\n")
        prompt = await system_prompt(" Be brief. ", sandbox, None, [skill])
        instructions, project, workspace, skills = prompt.split("\n\n")
        assert instructions == "Be brief."
        assert project == f'<project path="{sandbox.cwd}/AGENTS.md">\nUse tabs.\n</project>'
        capabilities = (await sandbox.capabilities()).describe()
        assert workspace == f"Working directory: {sandbox.cwd}, in a {capabilities}"
        assert workspace.count("\n") == 1
        assert skills.endswith("\n- review: Reviews changes.")


async def test_nearest_project_file_comes_last() -> None:
    async with virtual() as sandbox:
        for path in ("AGENTS.md", "app/AGENTS.md", "app/src/AGENTS.md", "other/AGENTS.md"):
            await sandbox.write_file(path, f"This is {path}.")
        await sandbox.write_file("/AGENTS.md", "Outside.")
        prompt = await system_prompt(None, sandbox, "app/src")
        found = [line for line in prompt.splitlines() if line.startswith("This is")]
        assert found == [
            "This is AGENTS.md.",
            "This is app/AGENTS.md.",
            "This is app/src/AGENTS.md.",
        ]
        assert "Outside" not in prompt
        assert f"Working directory: {sandbox.cwd}/app/src," in prompt
        assert "This is AGENTS.md" not in await system_prompt(None, sandbox, "app", root="app")


async def test_directory_outside_the_workspace_uses_only_its_own_file() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file("AGENTS.md", "Inside.")
        await sandbox.write_file("/srv/AGENTS.md", "There.")
        prompt = await system_prompt(None, sandbox, "/srv")
        assert "There." in prompt
        assert "Inside." not in prompt


async def test_root_directory_can_be_the_root() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file("/AGENTS.md", "Top.")
        assert '<project path="/AGENTS.md">' in await system_prompt(None, sandbox, root="/")


async def test_long_project_file_is_cut_between_characters() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file("AGENTS.md", "x" + "é" * MAX_PROJECT_BYTES)
        prompt = await system_prompt(None, sandbox)
        assert len(prompt.encode()) < MAX_PROJECT_BYTES + 8000
        assert f"has {2 * MAX_PROJECT_BYTES + 1} bytes; these are the first" in prompt
        assert "\ufffd" not in prompt


async def test_huge_project_file_is_only_named() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file("AGENTS.md", b"x" * (8 * 1024 * 1024 + 1))
        assert "AGENTS.md has 8388609 bytes, too many" in await system_prompt(None, sandbox)


async def test_invalid_project_file_is_tolerated() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file("AGENTS.md", b"\xffodd")
        assert "odd" in await system_prompt(None, sandbox)
        await sandbox.rm("AGENTS.md")
        await sandbox.mkdir("AGENTS.md")
        assert "<project" not in await system_prompt(None, sandbox)


async def test_prompt_without_workspace_is_the_instructions() -> None:
    assert await system_prompt("Be brief.", None) == "Be brief."
    assert await system_prompt(None, None) == ""
