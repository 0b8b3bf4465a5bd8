"""Parts of a sandbox's egress proxy that HTTP needs, as protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import ssl

    from smokebox.egress.handler import Handler, HandlerOption
    from smokebox.egress.policy import Egress
    from smokebox.engine.egress.http.upstream import UpstreamPool
    from smokebox.types import NetworkVerdict


class CertificateSource(Protocol):
    """The certificate authority of one sandbox."""

    def context_for(self, host: str) -> ssl.SSLContext:
        """Return the context of a server of that name. ALPN is http/1.1."""
        ...


class AuditSink(Protocol):
    """The audit log of one sandbox."""

    def note(
        self,
        *,
        verdict: NetworkVerdict,
        host: str,
        port: int,
        rule: str,
        protocol: Literal["http", "https", "tcp", "dns"],
        method: str | None = None,
        path: str | None = None,
        status: int | None = None,
        sent: int = 0,
        received: int = 0,
        seconds: float = 0.0,
        handler: str | None = None,
        reason: str = "",
    ) -> object:
        """Append one event that has ended; the log adds cursor and time."""
        ...


class TrafficMeter(Protocol):
    """The traffic limits of one sandbox."""

    def admit(self) -> str:
        """Count a request; return the reason if it is one too many."""
        ...

    def count(self, size: int) -> str:
        """Count bytes, either way; return the reason if they are too many."""
        ...


class HandlerSource(Protocol):
    """Finds the function that a policy names."""

    async def resolve(self, option: HandlerOption) -> Handler:
        """Return the handler. Raises if there is none."""
        ...


class ProxyContext(Protocol):
    """The egress proxy of a sandbox, as HTTP sees it. `policy` is read for each request."""

    @property
    def sandbox_id(self) -> str: ...
    @property
    def policy(self) -> Egress: ...
    @property
    def authority(self) -> CertificateSource: ...
    @property
    def audit_log(self) -> AuditSink: ...
    @property
    def meter(self) -> TrafficMeter: ...
    @property
    def handlers(self) -> HandlerSource: ...
    @property
    def env(self) -> Any: ...
    @property
    def pool(self) -> UpstreamPool: ...
