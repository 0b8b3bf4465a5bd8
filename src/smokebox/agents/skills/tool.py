"""The skill tool: loads a skill, or one of its files, when the model wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.skills.skill import find_skill
from smokebox.agents.tools.read import show
from smokebox.agents.tools.tool import Tool, ToolResult
from smokebox.agents.tools.truncation import MAX_LINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.skills.skill import Skill

DESCRIPTION = """\
Load a skill: how to do a certain kind of task well. Load it before you begin such a task, and \
follow it. With file, read one of the files that belong to it."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "Which skill, by its name."},
        "file": {"type": "string", "description": "Which of its files to read, if one."},
        "offset": {
            "type": "integer",
            "minimum": 1,
            "description": "Line to start at, counted from 1. Default 1.",
        },
    },
    "required": ["name"],
    "additionalProperties": False,
}


def skill_tool(skills: Sequence[Skill]) -> Tool:
    """`skill`, over these. Which ones there are is said in the system prompt."""

    async def skill(name: str, file: str | None = None, offset: int = 1) -> ToolResult:
        found = find_skill(skills, name)
        if file is None:
            return show("SKILL.md", (await found.load()).encode(), offset, MAX_LINES)
        return show(file, await found.read(file), offset, MAX_LINES)

    return Tool(name="skill", description=DESCRIPTION, parameters=PARAMETERS, function=skill)
