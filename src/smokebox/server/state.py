"""What all requests to one server share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.server.patterns import Patterns

if TYPE_CHECKING:
    from smokebox.engine import Host
    from smokebox.server.drain import Drain
    from smokebox.server.health import Health
    from smokebox.server.hosts import Hosts
    from smokebox.server.idempotency import Requests
    from smokebox.server.keys import Keys
    from smokebox.server.limits import Limits
    from smokebox.server.metrics import Metrics
    from smokebox.server.previews.previews import Previews
    from smokebox.server.settings import Settings
    from smokebox.server.telemetry import Telemetry


@dataclass(slots=True, kw_only=True)
class State:
    """The engine, and what the server keeps besides."""

    host: Host
    settings: Settings
    hosts: Hosts
    keys: Keys
    requests: Requests
    limits: Limits
    drain: Drain
    health: Health
    metrics: Metrics
    telemetry: Telemetry | None
    previews: Previews
    patterns: Patterns = field(default_factory=Patterns)
