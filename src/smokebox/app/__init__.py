"""Serving agents and workflows: a folder of Python files as a service with durable work.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.app.app import dispatch as dispatch
    from smokebox.app.asgi import create_app as create_app
    from smokebox.app.context import WorkflowContext as WorkflowContext

_HOME = {"WorkflowContext": "context", "create_app": "asgi", "dispatch": "app"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'smokebox.app' has no attribute {name!r}")
    value: object = getattr(import_module(f"smokebox.app.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
