"""What the HTTP side needs of the door of a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import ssl

    from smokebox.egress.handler import Handler, HandlerOption
    from smokebox.egress.policy import Egress
    from smokebox.engine.egress.http.pool import Pool
    from smokebox.types import NetworkVerdict


class Authority(Protocol):
    """The certificate authority of one sandbox."""

    def context_for(self, host: str) -> ssl.SSLContext:
        """What a server of that name shows. ALPN is http/1.1."""
        ...


class Journal(Protocol):
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
        """One thing that ended: a `NetworkEvent`, to which the journal adds cursor and time."""
        ...


class Meter(Protocol):
    """The limits of one sandbox."""

    def admit(self) -> str:
        """Count a request; the reason why it is one too many, or nothing."""
        ...

    def count(self, size: int) -> str:
        """Count bytes, either way; the reason why they are too many, or nothing."""
        ...


class Handlers(Protocol):
    """What finds the function that a policy names."""

    async def resolve(self, option: HandlerOption) -> Handler:
        """The handler itself. Raises where there is none."""
        ...


class Doorway(Protocol):
    """The door of a sandbox, as requests pass it. `policy` is asked anew for each.

    Handlers of clients are functions that ask them.
    """

    @property
    def sandbox_id(self) -> str: ...
    @property
    def policy(self) -> Egress: ...
    @property
    def authority(self) -> Authority: ...
    @property
    def journal(self) -> Journal: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def handlers(self) -> Handlers: ...
    @property
    def env(self) -> Any: ...
    @property
    def pool(self) -> Pool:
        """Connections to servers; made by the door, and closed with it."""
        ...
