"""Settings of a server: addresses, access, limits and lifetime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.host import POOL_SIZE
from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.tenancy.connections import HEAD_SECONDS, PER_ADDRESS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.isolation import Tier
    from smokebox.sandbox.access import Access
    from smokebox.tenancy.profile import Profile

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedBucket:
    """A bucket that the server offers to clients, with its credentials."""

    bucket: str
    prefix: str
    read_only: bool
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Options of `smokebox serve`.

    Attributes:
        home: State directory. The server always listens on the unix socket in it.
        host: Address to listen on by TCP; None for the unix socket only.
        port: TCP port, 0 for any free one.
        keys: Require an API key for requests by TCP. None: only if `host` is not loopback.
            Without, a loopback address serves only this user and root, and any other address
            every client.
        hosts: Accepted names in the Host header besides those it listens on, `*` for any. A
            server that requires keys accepts any name unless this is set.
        origins: Web sites, as https://name, whose pages may send requests, `*` for any.
        preview_url: Parent of previews, such as https://preview.example.com; all names below it
            must resolve to this server. Previews are always available below localhost.
        preview_timeout: Seconds that a program behind a preview may stay silent before and within
            a response. WebSockets have no limit.
        head_timeout: Seconds that the head of a request may take, from the connection or its
            first byte to its end.
        address_connections: Open TCP connections of each address.
        max_connections: Open TCP connections in all. None: half of the files that the server may
            open.
        trusted_proxies: Addresses or networks of reverse proxies, which tell the address of their
            clients in X-Forwarded-For.
        rate: Requests per second of each key; None for no limit.
        concurrency: Concurrent requests of each key; None for no limit.
        limit_socket: Apply both limits to the unix socket too.
        max_body: Longest body in bytes. Files have no limit.
        idle_exit: Seconds without a request and a running sandbox until the server stops; None
            for never.
        drain_seconds: Time that running requests have when the server stops.
        tier: Default tier of sandboxes.
        pool: Number of sandboxes created ahead.
        private_networks: Private networks, and addresses with ports, that every key may reach.
        buckets: Buckets that clients may mount by name, without credentials.
        handlers: Egress handlers that clients may name: `package.module:name`, or globs.
        profiles: Ceilings of keys by name. Keys that name none have `default`.
        backups: URL of the bucket for backups. Defaults to the state directory.
        directories: Absolute paths of root file systems by name, for the images `dir:NAME`.
        storage_pool: Bytes of the storage pool in the state directory; None for no pool.
        registries: Container registries: the one of short names, mirrors, and the server's own
            credentials.
        log_json: Log lines of JSON.
        otlp_endpoint: URL to send spans to, by OTLP over HTTP. Defaults to
            OTEL_EXPORTER_OTLP_ENDPOINT, if that is set.
    """

    home: str
    host: str | None = None
    port: int = 0
    keys: bool | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    preview_url: str | None = None
    preview_timeout: float = 300.0
    head_timeout: float = HEAD_SECONDS
    address_connections: int = PER_ADDRESS
    max_connections: int | None = None
    trusted_proxies: tuple[str, ...] = ()
    rate: float | None = None
    concurrency: int | None = None
    limit_socket: bool = False
    max_body: int = 16 << 20
    idle_exit: float | None = None
    drain_seconds: float = 10.0
    tier: Tier = "namespaces"
    pool: int = POOL_SIZE
    private_networks: tuple[str, ...] = ()
    buckets: Mapping[str, OfferedBucket] = field(default_factory=dict)
    handlers: tuple[str, ...] = ()
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    backups: str | None = None
    directories: Mapping[str, str] = field(default_factory=dict)
    storage_pool: int | None = None
    registries: RegistrySettings = field(default_factory=RegistrySettings)
    log_json: bool = False
    otlp_endpoint: str | None = None

    @property
    def needs_keys(self) -> bool:
        """True if a request by TCP needs an API key."""
        return self.host not in (None, *LOOPBACK) if self.keys is None else self.keys

    @property
    def checks_peers(self) -> bool:
        """True if requests by TCP without a key are served only to this user and root."""
        return self.host in LOOPBACK and not self.needs_keys
