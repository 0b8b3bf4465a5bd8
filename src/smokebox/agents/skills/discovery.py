"""Finds skills: in a workspace, in a folder of this host, in an installed package."""

from __future__ import annotations

import importlib.resources
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.agents.skills.skill import Skill, merge
from smokebox.agents.skills.sources import (
    MANIFEST,
    FolderSource,
    SandboxSource,
    SkillSource,
    parse_document,
)
from smokebox.agents.workspace import directories
from smokebox.errors import InvalidOption, NotFound, SmokeboxError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

    from smokebox.sandbox.api import SandboxApi

SKILLS_DIRECTORY = ".agents/skills"
MAX_MANIFEST_BYTES = 1024 * 1024

_log = logging.getLogger("smokebox.skills")


async def discover(sandbox: SandboxApi, cwd: str, *, root: str | None = None) -> list[Skill]:
    """The skills in `.agents/skills` of `cwd` and of the directories above it up to `root`,
    which is the sandbox's own directory where none is given; at any depth in there.

    One that cannot be read is left out, and the log says why: it may be the model's own work.
    Two of one name are a `Conflict`.
    """
    found: list[Skill] = []
    for directory in directories(sandbox, cwd, root):
        home = f"{directory.rstrip('/')}/{SKILLS_DIRECTORY}"
        if not await sandbox.exists(home):
            continue
        for path in await sandbox.glob(f"**/{MANIFEST}", cwd=home, files_only=True):
            try:
                found.append(await _in_sandbox(sandbox, path))
            except (ValueError, SmokeboxError) as error:
                _log.warning("the skill in %s is left out: %s", path, error)
    return merge(found)


def skill_folder(path: str | os.PathLike[str]) -> list[Skill]:
    """The skills in a folder of this host: the folder itself, or the folders in it."""
    folder = Path(path)
    if not folder.is_dir():
        raise NotFound(
            f"there is no folder {folder}.",
            hint=f"A skill is a folder with a {MANIFEST}.",
            kind="skill",
            name=str(path),
        )
    return _in_folder(folder, str(folder))


def skill_package(package: str) -> list[Skill]:
    """The skills in an installed package: those that lie beside its modules."""
    try:
        folder = importlib.resources.files(package)
    except (ImportError, TypeError) as error:
        raise NotFound(
            f"there is no package {package!r} to take skills from: {error}.",
            hint="Install it, or pass the name that `import` takes.",
            kind="skill",
            name=package,
        ) from error
    return _in_folder(folder, package)


async def _in_sandbox(sandbox: SandboxApi, path: str) -> Skill:
    info = await sandbox.stat(path)
    if info.size is not None and info.size > MAX_MANIFEST_BYTES:
        raise ValueError(f"it has {info.size} bytes, more than {MAX_MANIFEST_BYTES}")
    text = await sandbox.read_file(path)
    return _skill(text, SandboxSource(sandbox, path.removesuffix(f"/{MANIFEST}")))


def _in_folder(folder: Traversable, called: str) -> list[Skill]:
    found: list[Skill] = []
    for item in _manifests(folder):
        try:
            found.append(_skill(item.joinpath(MANIFEST).read_text("utf-8"), FolderSource(item)))
        except ValueError as error:
            raise InvalidOption(
                f"{item.name}/{MANIFEST} in {called} is not a skill: {error}.",
                hint="It begins with a head between two lines `---` that has name and description.",
                option="skills",
                value=item.name,
            ) from error
    if not found:
        raise NotFound(
            f"there is no skill in {called}.",
            hint=f"A skill is a folder with a {MANIFEST}.",
            kind="skill",
            name=called,
        )
    return merge(found)


def _manifests(folder: Traversable) -> Iterator[Traversable]:
    if folder.joinpath(MANIFEST).is_file():
        yield folder
        return
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir() and not item.name.startswith((".", "__")):
            yield from _manifests(item)


def _skill(text: str, source: SkillSource) -> Skill:
    head = parse_document(text).head
    for key in ("name", "description"):
        if not isinstance(head.get(key), str) or not head[key]:
            raise ValueError(f"its head has no {key}")
    description = " ".join(str(head["description"]).split())
    return Skill(name=str(head["name"]).strip(), description=description, source=source)
