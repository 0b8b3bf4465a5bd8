"""Whether all names in a request are those of the one server that it was judged for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from smokebox.egress.pattern import normal_host
from smokebox.engine.egress.http.head import Malformed, is_target

if TYPE_CHECKING:
    from smokebox.engine.egress.http.head import RequestHead

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(r"(https?)://([^/?#]*)(.*)", re.IGNORECASE)
# What may stand in a URL as it is.
_SAFE = "!#$%&'()*+,/:;=?@[]~-._"


@dataclass(frozen=True, slots=True)
class Origin:
    """The server that a connection leads to, as its names say: `host` is a `normal_host`."""

    host: str
    port: int
    tls: bool

    @property
    def scheme(self) -> str:
        """How URLs of it begin."""
        return "https" if self.tls else "http"

    @property
    def authority(self) -> str:
        """The host, with the port where that is not the usual."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def names(self, authority: str) -> bool:
        """Whether a Host header means this server. Raises `Malformed` for no host at all."""
        if authority == self.authority:
            return True
        found = _AUTHORITY.fullmatch(authority)
        if found is None:
            raise Malformed(f"Host {authority!r:.100} is not a host")
        port = int(found[2]) if found[2] else 443 if self.tls else 80
        return normal_host(found[1]) == self.host and port == self.port


def check_target(head: RequestHead, origin: Origin) -> str:
    """What to ask the server for, from its root on. Raises `Malformed`."""
    target = head.target
    if head.method == "CONNECT":
        raise Malformed("CONNECT is not for this door: connect to the host itself", 405)
    if not origin.names(head.host):
        raise Malformed(
            f"Host {head.host!r:.100} is not {origin.authority}, where the connection goes", 421
        )
    if not target.startswith("/"):
        target = _from_absolute(head, origin)
    if "#" in target:
        raise Malformed("the target of the request has a fragment")
    return target


def _from_absolute(head: RequestHead, origin: Origin) -> str:
    if head.target == "*" and head.method == "OPTIONS":
        return "*"
    found = _ABSOLUTE.fullmatch(head.target)
    if found is None:
        raise Malformed("the target of the request is neither a path nor a URL")
    scheme, authority, rest = found.groups()
    if scheme.lower() != origin.scheme or not origin.names(authority):
        raise Malformed(f"the URL of the request is not of {origin.scheme}://{origin.authority}")
    return rest if rest.startswith("/") else f"/{rest}"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a URL of a handler leads."""

    origin: Origin
    target: str


def destination(url: str) -> Destination:
    """The parts of a URL. Raises `Malformed` where it cannot be asked for."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise Malformed("the URL is not http:// or https:// with a host")
    tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = quote(target, safe=_SAFE)
    if not target.startswith("/") or not is_target(target):
        raise Malformed("the URL cannot be asked for")
    return Destination(Origin(normal_host(host), port or (443 if tls else 80), tls), target)
