"""By which names this server may be asked: others are a web page's trick (DNS rebinding)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from smokebox.errors import Forbidden
from smokebox.server.previews.sites import Sites
from smokebox.server.settings import LOOPBACK

if TYPE_CHECKING:
    from smokebox.server.settings import Settings

# A name or an IPv4 address, or an IPv6 address in brackets, and a port.
_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
# Names as clients spell them, with a port; more than a handful is somebody who plays.
_MOST_REMEMBERED = 64
_EXPOSED = b"x-request-id, retry-after"
_ALLOWED_HEADERS = b"authorization, content-type, idempotency-key, last-event-id, x-request-id"
_ALLOWED_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_MAX_AGE = b"600"


class Hosts:
    """The names and the origins that a server takes.

    What counts is the header Host. The name in a request line that has one (`GET
    http://name/path`) is for proxies, is used for nothing here, and no web page can send one.
    """

    def __init__(self, settings: Settings) -> None:
        names = (*LOOPBACK, *settings.hosts, settings.host or "")
        self._names = frozenset(name.strip("[]").lower() for name in names if name)
        # A page that tricks its way to a server with keys has none.
        self._any = "*" in settings.hosts or (settings.needs_keys and not settings.hosts)
        self._origins = frozenset(one.rstrip("/").lower() for one in settings.origins)
        self._sites = Sites(settings)
        self._good: set[bytes] = set()

    def check_host(self, told: bytes) -> None:
        """Raise `Forbidden` for a request by another name."""
        if told in self._good:
            return
        if self._sites.is_preview(told):
            raise Forbidden(
                f"{told.decode('latin-1')!r} is where a preview is, and not this API.",
                hint="Ask it over a connection of its own.",
                reason="host",
            )
        if not self._any and _name(told) not in self._names:
            raise Forbidden(
                f"this server is not asked by the name {told.decode('latin-1')!r}.",
                hint="Start it with --allow-host for each name that it has.",
                reason="host",
            )
        if len(self._good) < _MOST_REMEMBERED:
            self._good.add(told)

    def check_origin(self, origin: bytes, host: bytes) -> None:
        """Raise `Forbidden` for a request from a page of somebody else's."""
        if not self.allows(origin) and not _same(origin, host):
            raise Forbidden(
                f"pages of {origin.decode('latin-1')} may not ask this server.",
                hint="Start it with --allow-origin for each site whose pages may.",
                reason="origin",
            )

    def allows(self, origin: bytes) -> bool:
        """Whether pages of that other origin may ask."""
        return "*" in self._origins or origin.decode("latin-1").lower() in self._origins

    def headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """What a browser needs in order to show an answer to a page of another origin."""
        if not self._origins:
            return []
        # Answers differ by who asks: no cache may mix them up.
        headers = [(b"vary", b"origin")]
        if origin is not None and self.allows(origin):
            headers.append((b"access-control-allow-origin", origin))
            headers.append((b"access-control-expose-headers", _EXPOSED))
        return headers

    def preflight(self) -> list[tuple[bytes, bytes]]:
        """What a browser needs before it sends a request of a page of another origin."""
        return [
            (b"access-control-allow-methods", _ALLOWED_METHODS),
            (b"access-control-allow-headers", _ALLOWED_HEADERS),
            (b"access-control-max-age", _MAX_AGE),
        ]


def _name(told: bytes) -> str:
    found = _HOST.fullmatch(told)
    return (found[1] or found[2]).decode().lower().removesuffix(".") if found else ""


def _same(origin: bytes, host: bytes) -> bool:
    scheme, separator, rest = origin.partition(b"://")
    return bool(separator) and scheme in (b"http", b"https") and rest.lower() == host.lower()
