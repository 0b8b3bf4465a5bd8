"""State that all requests to one server share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.server.log_search import LogSearch

if TYPE_CHECKING:
    from smokebox.engine import Host
    from smokebox.server.health import Drain, HealthCheck
    from smokebox.server.hosts import AllowedHosts
    from smokebox.server.idempotency import IdempotencyStore
    from smokebox.server.metrics import Metrics
    from smokebox.server.previews.previews import Previews
    from smokebox.server.settings import ServerSettings
    from smokebox.server.telemetry import Telemetry
    from smokebox.server.tenancy.quotas import Quotas
    from smokebox.tenancy.connections import ConnectionLimits
    from smokebox.tenancy.keys import Keys
    from smokebox.tenancy.rate_limit import RateLimiter
    from smokebox.tenancy.running_requests import RunningRequests


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The engine, and the stores and counters of the server."""

    host: Host
    settings: ServerSettings
    hosts: AllowedHosts
    keys: Keys
    idempotency: IdempotencyStore
    rate_limiter: RateLimiter
    quotas: Quotas
    drain: Drain
    health: HealthCheck
    metrics: Metrics
    telemetry: Telemetry | None
    previews: Previews
    connections: ConnectionLimits
    running: RunningRequests
    log_search: LogSearch
