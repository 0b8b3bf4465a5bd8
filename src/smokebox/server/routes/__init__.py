"""The native API, one module for each noun, gathered by `all_endpoints` and `all_sockets`."""

from __future__ import annotations

from smokebox.server.routes import (
    archives,
    backups,
    code,
    exec,
    files,
    git,
    keys,
    mounts,
    network,
    ports,
    processes,
    sandboxes,
    sessions,
    system,
    terminals,
    watches,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.server.endpoint import Endpoint
    from smokebox.server.sockets import Socket

# A request is matched from the top: what is asked for most often comes first.
_MODULES = (
    exec,
    code,
    files,
    processes,
    sandboxes,
    sessions,
    terminals,
    ports,
    git,
    mounts,
    network,
    archives,
    backups,
    watches,
    system,
    keys,
)


def all_endpoints() -> list[Endpoint]:
    """Every endpoint of the API."""
    return [endpoint for module in _MODULES for endpoint in module.ENDPOINTS]


def all_sockets() -> list[Socket]:
    """Every WebSocket of the API."""
    return [*processes.SOCKETS, *terminals.SOCKETS, *ports.SOCKETS, *network.SOCKETS]
