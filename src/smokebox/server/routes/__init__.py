"""The native API, one module for each noun."""

from __future__ import annotations

from smokebox.server.routes import (
    archives,
    backups,
    builds,
    code,
    exec,
    files,
    git,
    images,
    keys,
    mounts,
    network,
    ports,
    processes,
    sandboxes,
    sessions,
    snapshots,
    system,
    terminals,
    watches,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.server.endpoint import ApiEndpoint
    from smokebox.server.websocket import WebSocketEndpoint

# Routes are matched in this order, so the most frequent requests come first.
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
    images,
    builds,
    snapshots,
    watches,
    system,
    keys,
)


def all_endpoints() -> list[ApiEndpoint]:
    """Return every endpoint of the API."""
    return [endpoint for module in _MODULES for endpoint in module.ENDPOINTS]


def all_sockets() -> list[WebSocketEndpoint]:
    """Return every WebSocket of the API."""
    return [*processes.SOCKETS, *terminals.SOCKETS, *ports.SOCKETS, *network.SOCKETS]
