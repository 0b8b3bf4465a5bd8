"""Skills: procedures that a model loads when a task needs them."""

from __future__ import annotations

from smokebox.agents.skills.discovery import discover, skill_folder, skill_package
from smokebox.agents.skills.skill import Skill, find_skill, merge, skill_tool

__all__ = [
    "Skill",
    "discover",
    "find_skill",
    "merge",
    "skill_folder",
    "skill_package",
    "skill_tool",
]
