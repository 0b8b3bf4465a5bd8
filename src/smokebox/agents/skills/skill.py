"""Skills: name, description, and instructions that a model loads when it needs them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.agents.skills.sources import CodeSource, SkillSource
from smokebox.agents.tools.output import MAX_LINES
from smokebox.agents.tools.read import show
from smokebox.agents.tools.tool import Tool, ToolResult
from smokebox.errors import Conflict, InvalidOption, NotFound
from smokebox.options import nearest_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


MAX_NAME = 64
MAX_DESCRIPTION = 1024
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A procedure for a model, which always sees `name` and `description`, and loads the rest.

    In code, pass `instructions`, and in `resources` files by name. `skill_folder` and
    `skill_package` return the skills of a folder or a package. Skills in the workspace are
    found by themselves.
    """

    name: str
    description: str
    instructions: str = field(default="", repr=False)
    resources: Mapping[str, str | bytes] = field(default_factory=dict, repr=False)
    source: SkillSource | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME or not _NAME.fullmatch(self.name):
            raise InvalidOption(
                f"{self.name!r} cannot be the name of a skill.",
                hint=f"Use at most {MAX_NAME} lowercase letters and digits, with single hyphens "
                "between them.",
                option="name",
                value=self.name,
            )
        if not self.description.strip() or len(self.description) > MAX_DESCRIPTION:
            raise InvalidOption(
                f"the description of the skill {self.name!r} has {len(self.description)} "
                f"characters; it must have 1 to {MAX_DESCRIPTION}.",
                hint="Say in a sentence what it does and when to use it.",
                option="description",
                value=self.name,
            )
        if self.source is None and not self.instructions.strip():
            raise InvalidOption(
                f"the skill {self.name!r} has no instructions.",
                hint="Pass instructions=, or use skill_folder(path).",
                option="instructions",
                value=self.name,
            )

    @property
    def directory(self) -> str | None:
        """Directory of its files in the workspace, or None if they are elsewhere."""
        return self._source.directory

    async def load(self) -> str:
        """Return the instructions, and a list of the other files."""
        text = (await self._source.instructions()).strip()
        files = await self.files()
        if not files:
            return text
        where = f"in {self.directory}" if self.directory else "read by the skill tool's `file`"
        return f"{text}\n\nFiles of this skill, {where}:\n" + "\n".join(files)

    async def files(self) -> list[str]:
        """Return the names of its files, sorted, without SKILL.md."""
        return await self._source.files()

    async def read(self, file: str) -> bytes:
        """Return one of its files. Raises `NotFound`."""
        known = await self.files()
        if file not in known:
            raise NotFound(
                f"the skill {self.name!r} has no file {file!r}.",
                hint=nearest_hint(file, known, "It has"),
                kind="file",
                name=file,
            )
        return await self._source.read(file)

    async def prompt(self, args: Mapping[str, object] | str | None = None) -> str:
        """Return the message by which a program, not the model, starts the skill."""
        text = f"Use the skill {self.name!r}:\n\n<skill>\n{await self.load()}\n</skill>"
        if not args:
            return text
        arguments = args if isinstance(args, str) else json.dumps(args, ensure_ascii=False)
        return f"{text}\n\nIts arguments: {arguments}"

    @property
    def _source(self) -> SkillSource:
        return self.source or CodeSource(self.instructions, self.resources)


def merge(*groups: Iterable[Skill]) -> list[Skill]:
    """Return all skills in order. Raises `Conflict` if two have the same name."""
    found: dict[str, Skill] = {}
    for skill in (skill for group in groups for skill in group):
        if not isinstance(skill, Skill):
            raise InvalidOption(
                f"{skill!r} is not a skill.",
                hint="Pass Skill(...), or the result of skill_folder or skill_package.",
                option="skills",
                value=repr(skill),
            )
        if skill.name in found:
            places = sorted(each.directory or "code" for each in (found[skill.name], skill))
            raise Conflict(
                f"two skills have the name {skill.name!r}: one from {places[0]}, one from "
                f"{places[1]}.",
                hint="Rename one of them.",
                kind="skill",
                name=skill.name,
            )
        found[skill.name] = skill
    return list(found.values())


def find_skill(skills: Sequence[Skill], name: str) -> Skill:
    """Return a skill by name. Raises `NotFound`, whose hint has the nearest name."""
    for skill in skills:
        if skill.name == name:
            return skill
    raise NotFound(
        f"there is no skill {name!r}.",
        hint=nearest_hint(name, [skill.name for skill in skills]),
        kind="skill",
        name=name,
    )


DESCRIPTION = """\
Load a skill: instructions for doing a certain kind of task well. Load it before you start such \
a task, and follow it. With file, read one of the files that belong to it."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "Name of the skill."},
        "file": {"type": "string", "description": "Name of one of its files, to read that."},
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
    """Return the tool `skill`. The system prompt lists the skills."""

    async def skill(name: str, file: str | None = None, offset: int = 1) -> ToolResult:
        found = find_skill(skills, name)
        if file is None:
            return show("SKILL.md", (await found.load()).encode(), offset, MAX_LINES)
        return show(file, await found.read(file), offset, MAX_LINES)

    return Tool(name="skill", description=DESCRIPTION, parameters=PARAMETERS, function=skill)
