"""The system prompt of a session, and the message that announces changes to it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from smokebox.agents.log.records import ResourcesChanged
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.tools.output import head
from smokebox.agents.workspace import directories
from smokebox.errors import PathError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from smokebox.agents.log.conversation import Conversation
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
    """Build the system prompt: instructions, AGENTS.md, the workspace's capabilities, skills.

    AGENTS.md is looked for in `cwd` and its parents up to `root`, by default the sandbox's
    working directory; the nearest one comes last. The prompt has nothing that changes by
    itself, such as the date, so that providers can cache it.
    """
    parts = [(instructions or "").strip()]
    if sandbox is not None:
        here = cwd if cwd is not None else sandbox.cwd
        parts += [await _project(sandbox, each) for each in directories(sandbox, here, root)]
        parts.append(await _workspace(sandbox, here))
    parts.append(_skills(skills))
    return "\n\n".join(filter(None, parts))


async def _project(sandbox: SandboxApi, directory: str) -> str:
    """Return the AGENTS.md of one directory as a section, or "" if it is missing or empty."""
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
    description = (await sandbox.capabilities()).describe()
    return f"Working directory: {sandbox.resolve_path(cwd)}, in a {description}"


def _skills(skills: Sequence[Skill]) -> str:
    if not skills:
        return ""
    lines = (f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills)
    return "Skills, to be loaded with the skill tool when one fits the task:\n" + "\n".join(lines)


def digest(instructions: str) -> str:
    """Return the hash by which changed instructions are detected."""
    return hashlib.sha256(instructions.encode()).hexdigest()[:16]


def changed(
    conversation: Conversation, tools: Sequence[dict[str, Any]], instructions: str
) -> ResourcesChanged | None:
    """Return the change of tools and instructions since the last turn, or None.

    The system prompt stays as it is, and remaining tools keep their order, so that as much of
    a provider's cache as possible stays valid.
    """
    known = conversation.resources
    if known is None:
        return None
    now = digest(instructions)
    before, names = _names(known.tools), _names(tools)
    added = [name for name in names if name not in before]
    removed = [name for name in before if name not in names]
    changes = []
    if added:
        changes.append(f"These tools have been added: {', '.join(added)}.")
    if removed:
        changes.append(f"These tools have been removed: {', '.join(removed)}.")
    if now != known.instructions and known.instructions:
        text = instructions.strip() or "(none)"
        changes.append(f"Your instructions have changed. They are now:\n\n{text}")
    if not changes:
        return None
    message = UserMessage((Text("\n\n".join(changes)),), signal="resources")
    return ResourcesChanged(tuple(tools), now, message)


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [str(tool["name"]) for tool in tools]
