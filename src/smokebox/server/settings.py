"""How a server is to be: where it listens, who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.host import POOL_SIZE

if TYPE_CHECKING:
    from smokebox.engine.jail.api import Tier

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `smokebox serve` takes.

    Without `host` and `port` it listens on the unix socket of its state directory only.
    `keys` says whether a request by TCP needs an API key: None for where anybody else than
    this machine can ask. `hosts` are names that it may be asked by, besides those that it
    listens on; `origins` the web pages that may ask. `rate` is requests a second and
    `concurrency` requests at a time, for each key. `idle_exit` is seconds without a request
    and without a sandbox that runs.
    """

    home: str
    host: str | None = None
    port: int = 0
    keys: bool | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    rate: float | None = None
    concurrency: int | None = None
    max_body: int = 16 << 20
    idle_exit: float | None = None
    drain_seconds: float = 10.0
    tier: Tier = "namespaces"
    pool: int = POOL_SIZE
    git_private: bool = False
    log_json: bool = field(default=False)

    @property
    def needs_keys(self) -> bool:
        """Whether a request by TCP needs an API key."""
        return self.host not in (None, *LOOPBACK) if self.keys is None else self.keys
