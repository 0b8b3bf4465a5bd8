"""Checks of the Host and Origin headers, against DNS rebinding and foreign web pages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from smokebox.errors import Forbidden
from smokebox.server.previews.names import PreviewNames
from smokebox.server.settings import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.server.settings import ServerSettings

# A name or an IPv4 address, or an IPv6 address in brackets, and a port.
_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
# Accepted values of Host to remember. Clients use few; a bound keeps others from filling memory.
_MOST_REMEMBERED = 64
_EXPOSED_HEADERS = b"x-request-id, retry-after"
_ALLOWED_HEADERS = b"authorization, content-type, idempotency-key, last-event-id, x-request-id"
_ALLOWED_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_MAX_AGE = b"600"


class AllowedHosts:
    """The host names and origins that a server accepts.

    Only the header Host counts. The name in an absolute request line (`GET http://name/path`) is
    meant for proxies; it is ignored here, and a web page cannot send one.
    """

    def __init__(self, settings: ServerSettings) -> None:
        names = (*LOOPBACK, *settings.hosts, settings.host or "")
        self._names = frozenset(name.strip("[]").lower() for name in names if name)
        # DNS rebinding does not help against a server with keys: the page has no key.
        self._any = "*" in settings.hosts or (settings.needs_keys and not settings.hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.origins)
        self._previews = PreviewNames(settings)
        self._accepted: set[bytes] = set()

    def check_host(self, host: bytes) -> None:
        """Raise `Forbidden` for a Host header that is not accepted."""
        if host in self._accepted:
            return
        if self._previews.is_preview(host.decode("latin-1")):
            raise Forbidden(
                f"{host.decode('latin-1')!r} is the host of a preview, not of this API.",
                hint="Send requests to it over a separate connection.",
                reason="host",
            )
        if not self._any and _host_name(host) not in self._names:
            raise Forbidden(
                f"this server does not accept the host name {host.decode('latin-1')!r}.",
                hint="Start it with --allow-host for each of its names.",
                reason="host",
            )
        if len(self._accepted) < _MOST_REMEMBERED:
            self._accepted.add(host)

    def check_origin(self, origin: bytes, host: bytes) -> None:
        """Raise `Forbidden` for a request from a page of a foreign origin."""
        if not self.allows(origin) and not _is_same_origin(origin, host):
            raise Forbidden(
                f"pages of {origin.decode('latin-1')} may not send requests to this server.",
                hint="Start it with --allow-origin for each site whose pages may.",
                reason="origin",
            )

    def check_site(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Forbidden` for a request that a page of another site makes without an Origin.

        Browsers send none with images, scripts and links: a page could wake sandboxes with them.
        """
        foreign = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        if foreign and b"origin" not in headers and "*" not in self._origins:
            raise Forbidden(
                "pages of other sites may not send requests to this server.",
                hint="Open the address itself. The pages of a site that was named with "
                "--allow-origin send their origin with fetch().",
                reason="site",
            )

    def allows(self, origin: bytes) -> bool:
        """Return true if pages of this origin may send requests."""
        return "*" in self._origins or origin.decode("latin-1").lower() in self._origins

    def headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """Return the headers that let a page of another origin read a response."""
        if not self._origins:
            return []
        # Responses differ by origin, so caches must keep them apart.
        headers = [(b"vary", b"origin")]
        if origin is not None and self.allows(origin):
            headers.append((b"access-control-allow-origin", origin))
            headers.append((b"access-control-expose-headers", _EXPOSED_HEADERS))
        return headers

    def preflight(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of a response to a CORS preflight."""
        return [
            (b"access-control-allow-methods", _ALLOWED_METHODS),
            (b"access-control-allow-headers", _ALLOWED_HEADERS),
            (b"access-control-max-age", _MAX_AGE),
        ]


def _host_name(host: bytes) -> str:
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).decode().lower().removesuffix(".") if found else ""


def _is_same_origin(origin: bytes, host: bytes) -> bool:
    scheme, separator, rest = origin.partition(b"://")
    return bool(separator) and scheme in (b"http", b"https") and rest.lower() == host.lower()
