"""Linux sandboxes by stable id on one host: the owner of each sandbox, and its jail.

Public names are imported on first use: the processes that make up a jail import from this
package too, and must stay small.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # Defined here because importing typing costs startup time.
if TYPE_CHECKING:
    from smokebox.engine.host import Host as Host
    from smokebox.engine.sandbox import Sandbox as Sandbox
    from smokebox.limits import Limits as Limits
    from smokebox.limits import ProcessLimits as ProcessLimits

_HOME = {
    "Host": "smokebox.engine.host",
    "Limits": "smokebox.limits",
    "ProcessLimits": "smokebox.limits",
    "Sandbox": "smokebox.engine.sandbox",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'smokebox.engine' has no attribute {name!r}")
    return getattr(import_module(home), name)
