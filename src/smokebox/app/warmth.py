"""Imports what the agents of a project will need, before the first of them is asked."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING

from smokebox.agents.providers import find_model
from smokebox.app.served import ServedAgent
from smokebox.client.bindings import load
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.app.project import Project

_MODULES = {"anthropic": "pydantic_ai.models.anthropic", "google": "pydantic_ai.models.google"}
_OTHERS = "pydantic_ai.models.openai"


def warm_up(project: Project) -> None:
    """Import what speaks to the models that are named. It takes seconds, so call it in a thread.

    What is missing is an error of whoever asks for it.
    """
    config = load(project.folder).models
    for spec in _models(project):
        with contextlib.suppress(SmokeboxError, ImportError):
            provider = find_model(spec, config).provider
            import_module(_MODULES.get(provider.api, _OTHERS))


def _models(project: Project) -> set[str]:
    return {
        choice
        for served in project.agents.values()
        if isinstance(served, ServedAgent)
        for choice in served.agent.given.get("model", ())
        if isinstance(choice, str)
    }
