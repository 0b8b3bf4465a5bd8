"""The native API, one module for each noun. `all_endpoints` gathers them."""

from __future__ import annotations

from smokebox.server.routes import (
    archives,
    exec,
    files,
    keys,
    processes,
    sandboxes,
    sessions,
    system,
    watches,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.server.endpoint import Endpoint

# A request is matched from the top: what is asked for most often comes first.
_MODULES = (exec, files, processes, sandboxes, sessions, archives, watches, system, keys)


def all_endpoints() -> list[Endpoint]:
    """Every endpoint of the API."""
    return [endpoint for module in _MODULES for endpoint in module.ENDPOINTS]
