"""Finds skills in a workspace, in a folder of this host, or in an installed package."""

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
    """Return the skills at any depth in `.agents/skills` of `cwd` and its parents up to `root`.

    `root` is by default the sandbox's working directory. An invalid skill is skipped with a
    warning in the log, as the model may have written it.

    Raises:
        Conflict: Two skills have the same name.
    """
    found: list[Skill] = []
    for directory in directories(sandbox, cwd, root):
        skills = f"{directory.rstrip('/')}/{SKILLS_DIRECTORY}"
        if not await sandbox.exists(skills):
            continue
        for path in await sandbox.glob(f"**/{MANIFEST}", cwd=skills, files_only=True):
            try:
                found.append(await _load_from_sandbox(sandbox, path))
            except (ValueError, SmokeboxError) as error:
                _log.warning("the skill %s was skipped: %s", path, error)
    return merge(found)


def skill_folder(path: str | os.PathLike[str]) -> list[Skill]:
    """Return the skills in a folder of this host: the folder itself, or folders in it.

    Raises:
        NotFound: There is no such folder, or no skill in it.
        InvalidOption: A SKILL.md is invalid.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise NotFound(
            f"there is no folder {folder}.",
            hint=f"A skill is a folder with a {MANIFEST}.",
            kind="skill",
            name=str(path),
        )
    return _load_from_folder(folder, str(folder))


def skill_package(package: str) -> list[Skill]:
    """Return the skills in an installed package.

    Args:
        package: Import name of the package.

    Raises:
        NotFound: There is no such package, or no skill in it.
        InvalidOption: A SKILL.md is invalid.
    """
    try:
        folder = importlib.resources.files(package)
    except (ImportError, TypeError) as error:
        raise NotFound(
            f"there is no package {package!r} with skills: {error}.",
            hint="Install it, or pass its import name.",
            kind="skill",
            name=package,
        ) from error
    return _load_from_folder(folder, package)


async def _load_from_sandbox(sandbox: SandboxApi, path: str) -> Skill:
    info = await sandbox.stat(path)
    if info.size is not None and info.size > MAX_MANIFEST_BYTES:
        raise ValueError(f"it has {info.size} bytes, more than {MAX_MANIFEST_BYTES}")
    text = await sandbox.read_file(path)
    return _skill(text, SandboxSource(sandbox, path.removesuffix(f"/{MANIFEST}")))


def _load_from_folder(folder: Traversable, label: str) -> list[Skill]:
    found: list[Skill] = []
    for item in _skill_folders(folder):
        try:
            found.append(_skill(item.joinpath(MANIFEST).read_text("utf-8"), FolderSource(item)))
        except ValueError as error:
            raise InvalidOption(
                f"{item.name}/{MANIFEST} in {label} is not a skill: {error}.",
                hint="Start it with front matter between two `---` lines, with name and "
                "description.",
                option="skills",
                value=item.name,
            ) from error
    if not found:
        raise NotFound(
            f"there is no skill in {label}.",
            hint=f"A skill is a folder with a {MANIFEST}.",
            kind="skill",
            name=label,
        )
    return merge(found)


def _skill_folders(folder: Traversable) -> Iterator[Traversable]:
    if folder.joinpath(MANIFEST).is_file():
        yield folder
        return
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir() and not item.name.startswith((".", "__")):
            yield from _skill_folders(item)


def _skill(text: str, source: SkillSource) -> Skill:
    front_matter = parse_document(text).front_matter
    for key in ("name", "description"):
        if not isinstance(front_matter.get(key), str) or not front_matter[key]:
            raise ValueError(f"its front matter has no {key}")
    description = " ".join(str(front_matter["description"]).split())
    return Skill(name=str(front_matter["name"]).strip(), description=description, source=source)
