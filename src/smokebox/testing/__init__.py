"""Test doubles for agents and sandboxes: scripted models, fake servers and fixtures.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.testing.fake.server import FakeModelServer as FakeModelServer
    from smokebox.testing.project import serve_project as serve_project
    from smokebox.testing.recorded_models import RecordedModels as RecordedModels
    from smokebox.testing.scripted import ScriptedModel as ScriptedModel
    from smokebox.testing.scripted import ScriptExhausted as ScriptExhausted
    from smokebox.testing.scripted import Turn as Turn
    from smokebox.testing.scripted import call as call
    from smokebox.testing.scripted import last_returns as last_returns
    from smokebox.testing.scripted import last_text as last_text
    from smokebox.testing.scripted import think as think
    from smokebox.testing.seaweed import SeaweedServer as SeaweedServer

_HOME = {
    "FakeModelServer": "fake.server",
    "RecordedModels": "recorded_models",
    "ScriptExhausted": "scripted",
    "ScriptedModel": "scripted",
    "SeaweedServer": "seaweed",
    "Turn": "scripted",
    "call": "scripted",
    "last_returns": "scripted",
    "last_text": "scripted",
    "serve_project": "project",
    "think": "scripted",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'smokebox.testing' has no attribute {name!r}")
    value: object = getattr(import_module(f"smokebox.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value
