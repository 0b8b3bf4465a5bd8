"""What a model is told before it is asked anything: the system prompt of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.truncation import head
from smokebox.agents.workspace import directories
from smokebox.errors import PathError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.skills import Skill
    from smokebox.sandbox.api import SandboxApi

PROJECT_FILE = "AGENTS.md"
MAX_PROJECT_BYTES = 32 * 1024
MAX_READ_BYTES = 8 * 1024 * 1024


async def system_prompt(
    instructions: str | None,
    sandbox: SandboxApi | None,
    cwd: str | None = None,
    skills: Sequence[Skill] = (),
    *,
    root: str | None = None,
) -> str:
    """Instructions, the workspace's AGENTS.md, two lines on what it can do, and the skills.

    AGENTS.md is looked for in `cwd` and above it up to `root`, the sandbox's own directory
    where none is given; the nearest one comes last. There is nothing in it that changes by
    itself, so that a provider's cache holds.
    """
    parts = [(instructions or "").strip()]
    if sandbox is not None:
        here = cwd if cwd is not None else sandbox.cwd
        parts += [await _project(sandbox, each) for each in directories(sandbox, here, root)]
        parts.append(await _workspace(sandbox, here))
    parts.append(_skills(skills))
    return "\n\n".join(filter(None, parts))


async def _project(sandbox: SandboxApi, directory: str) -> str:
    """What AGENTS.md of one directory says, if there is one with something in it."""
    path = f"{directory.rstrip('/')}/{PROJECT_FILE}"
    try:
        size = (await sandbox.stat(path)).size or 0
        if size > MAX_READ_BYTES:
            return f"[{path} has {size} bytes, too many to show: read the parts you need.]"
        data = await sandbox.read_bytes(path)
    except PathError:
        return ""
    shown = head(data, MAX_PROJECT_BYTES)
    text = shown.decode(errors="replace").strip()
    if not text:
        return ""
    if len(shown) < len(data):
        text += f"\n\n[{path} has {len(data)} bytes; these are the first {len(shown)}.]"
    return f'<project path="{path}">\n{text}\n</project>'


async def _workspace(sandbox: SandboxApi, cwd: str) -> str:
    said = (await sandbox.capabilities()).describe()
    return f"Working directory: {sandbox.resolve_path(cwd)}, in a {said}"


def _skills(skills: Sequence[Skill]) -> str:
    if not skills:
        return ""
    lines = (f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills)
    return "Skills, to be loaded with the skill tool when one fits the task:\n" + "\n".join(lines)
