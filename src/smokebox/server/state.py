"""What all requests to one server share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.engine import Host
    from smokebox.server.hosts import Hosts
    from smokebox.server.idempotency import Requests
    from smokebox.server.keys import Keys
    from smokebox.server.settings import Settings


@dataclass(slots=True, kw_only=True)
class State:
    """The engine, and what the server keeps besides."""

    host: Host
    settings: Settings
    hosts: Hosts
    keys: Keys
    requests: Requests
    draining: bool = False
