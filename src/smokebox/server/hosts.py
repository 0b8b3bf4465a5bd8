"""By which names this server may be asked: others are a web page's trick (DNS rebinding)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from smokebox.errors import Forbidden
from smokebox.server.settings import LOOPBACK

if TYPE_CHECKING:
    from smokebox.server.settings import Settings


class Hosts:
    """The names and the origins that a server takes."""

    def __init__(self, settings: Settings) -> None:
        self._names = frozenset(
            name.lower() for name in (*LOOPBACK, *settings.hosts, settings.host or "") if name
        )
        self._any = "*" in settings.hosts
        self._origins = frozenset(settings.origins)

    def check(self, headers: dict[bytes, bytes]) -> None:
        """Raise `Forbidden` for a request by another name, or from another's page."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._any and _name(host) not in self._names:
            raise Forbidden(
                f"this server is not asked by the name {host!r}.",
                hint="Start it with --allow-host for each name that it has.",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self.takes(origin, host):
            raise Forbidden(
                f"pages of {origin} may not ask this server.",
                hint="Start it with --allow-origin for each site whose pages may.",
            )

    def takes(self, origin: str, host: str) -> bool:
        """Whether pages of that origin may ask."""
        return origin in self._origins or "*" in self._origins or urlsplit(origin).netloc == host


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
