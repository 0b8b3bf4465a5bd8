"""Linux sandboxes by stable id on one host: the owner of each, and the jail it lives in.

Names are imported when they are first used: the processes that jails are made of import
from this package too, and stay small.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # As typing has it, without the time that importing typing takes.
if TYPE_CHECKING:
    from smokebox.engine.host import Host as Host
    from smokebox.engine.limits import Limits as Limits
    from smokebox.engine.limits import ProcessLimits as ProcessLimits
    from smokebox.engine.sandbox import Sandbox as Sandbox

_HOME = {
    "Host": "smokebox.engine.host",
    "Limits": "smokebox.engine.limits",
    "ProcessLimits": "smokebox.engine.limits",
    "Sandbox": "smokebox.engine.sandbox",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'smokebox.engine' has no attribute {name!r}")
    return getattr(import_module(home), name)
