"""Models that are scripted, servers that are ours: what tests of agents and sandboxes need."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.testing.fake.server import FakeModelServer as FakeModelServer
    from smokebox.testing.project import served as served
    from smokebox.testing.recording.server import RecordedModels as RecordedModels
    from smokebox.testing.scripted import ScriptedModel as ScriptedModel
    from smokebox.testing.scripted import ScriptExhausted as ScriptExhausted
    from smokebox.testing.seaweed import Seaweed as Seaweed
    from smokebox.testing.turns import Turn as Turn
    from smokebox.testing.turns import call as call
    from smokebox.testing.turns import last_returns as last_returns
    from smokebox.testing.turns import last_text as last_text
    from smokebox.testing.turns import think as think

_HOME = {
    "FakeModelServer": "fake.server",
    "RecordedModels": "recording.server",
    "ScriptExhausted": "scripted",
    "ScriptedModel": "scripted",
    "Seaweed": "seaweed",
    "Turn": "turns",
    "call": "turns",
    "last_returns": "turns",
    "last_text": "turns",
    "served": "project",
    "think": "turns",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    # Who wants a scripted model does not pay for the import of a server, nor the other way.
    if name not in _HOME:
        raise AttributeError(f"module 'smokebox.testing' has no attribute {name!r}")
    value: object = getattr(import_module(f"smokebox.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value
