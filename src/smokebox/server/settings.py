"""How a server is to be: where it listens, who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.host import POOL_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.jail.api import Tier
    from smokebox.sandbox.access import Access

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket that a server offers, with what opens it."""

    bucket: str
    prefix: str
    read_only: bool
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `smokebox serve` takes.

    Where it is: `home` is its state directory, and the unix socket there is always listened
    on, for who may enter that directory. With `host` it listens by TCP too, on `port`, or on
    any that is free for 0.

    Who may ask by TCP: `keys` says whether a request needs an API key; None for yes where
    anybody else than this machine can ask. `hosts` are names that it may be asked by besides
    those that it listens on, `*` for any; one that wants keys takes any unless some are
    given. `origins` are the web sites, as https://name, whose pages may ask, `*` for any.

    Where previews are: below `preview_url`, such as https://preview.example.com, all names
    below which lead to this server; and always below localhost.

    How much: `rate` is requests a second and `concurrency` requests at a time, for each key,
    None for no limit; by the unix socket only with `limit_socket`. `max_body` is the longest
    body in bytes, for all but files.

    How it ends: after `idle_exit` seconds without a request and without a sandbox that runs,
    None for never. When it is told to end, what it is at has `drain_seconds`.

    What is in it: `tier` isolates a sandbox that asks for nothing else, `pool` is how many
    are made ahead. `git_private` lets clones come from private addresses. `buckets` are those
    that clients may mount by name, without credentials of their own, and `bucket_private` lets
    theirs be at private addresses. `backups` is the URL of the bucket that keeps backups, by
    default the state directory does.

    What operators see: with `log_json` each line of its log is JSON. `otlp_endpoint` is where
    spans are sent by OTLP over HTTP, by default OTEL_EXPORTER_OTLP_ENDPOINT, if that is set.
    """

    home: str
    host: str | None = None
    port: int = 0
    keys: bool | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    preview_url: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    limit_socket: bool = False
    max_body: int = 16 << 20
    idle_exit: float | None = None
    drain_seconds: float = 10.0
    tier: Tier = "namespaces"
    pool: int = POOL_SIZE
    git_private: bool = False
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    bucket_private: bool = False
    backups: str | None = None
    log_json: bool = False
    otlp_endpoint: str | None = None

    @property
    def needs_keys(self) -> bool:
        """Whether a request by TCP needs an API key."""
        return self.host not in (None, *LOOPBACK) if self.keys is None else self.keys
