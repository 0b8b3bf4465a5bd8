"""Targets of requests: every name in a request must be that of the server it was checked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from smokebox.egress.pattern import normal_host
from smokebox.foundation.http1.head import MalformedMessage, is_target

if TYPE_CHECKING:
    from smokebox.foundation.http1.head import RequestHead

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(r"(https?)://([^/?#]*)(.*)", re.IGNORECASE)
_SAFE_IN_URL = "!#$%&'()*+,/:;=?@[]~-._"


@dataclass(frozen=True, slots=True)
class Origin:
    """The server that a connection leads to; `host` is a `normal_host`."""

    host: str
    port: int
    tls: bool

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "https" if self.tls else "http"

    @property
    def authority(self) -> str:
        """The host, with the port unless it is the default one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def matches(self, authority: str) -> bool:
        """Tell whether a Host header names this server. Raises `MalformedMessage`."""
        if authority == self.authority:
            return True
        match = _AUTHORITY.fullmatch(authority)
        if match is None:
            raise MalformedMessage(f"Host {authority!r:.100} is not a host")
        port = int(match[2]) if match[2] else 443 if self.tls else 80
        return normal_host(match[1]) == self.host and port == self.port


def check_target(head: RequestHead, origin: Origin) -> str:
    """Return the path and query to request from the server. Raises `MalformedMessage`."""
    target = head.target
    if head.method == "CONNECT":
        raise MalformedMessage("CONNECT is not supported: connect to the host itself", 405)
    if not origin.matches(head.host):
        raise MalformedMessage(
            f"Host {head.host!r:.100} is not {origin.authority}, where the connection goes", 421
        )
    if not target.startswith("/"):
        target = _from_absolute(head, origin)
    if "#" in target:
        raise MalformedMessage("the target of the request has a fragment")
    return target


def _from_absolute(head: RequestHead, origin: Origin) -> str:
    if head.target == "*" and head.method == "OPTIONS":
        return "*"
    match = _ABSOLUTE.fullmatch(head.target)
    if match is None:
        raise MalformedMessage("the target of the request is neither a path nor a URL")
    scheme, authority, rest = match.groups()
    if scheme.lower() != origin.scheme or not origin.matches(authority):
        raise MalformedMessage(
            f"the URL of the request is not of {origin.scheme}://{origin.authority}"
        )
    return rest if rest.startswith("/") else f"/{rest}"


@dataclass(frozen=True, slots=True)
class Destination:
    """A handler's URL, split into the server and the target there."""

    origin: Origin
    target: str


def parse_destination(url: str) -> Destination:
    """Split a URL. Raises `MalformedMessage` if it cannot be requested."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise MalformedMessage("the URL is not http:// or https:// with a host")
    tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = quote(target, safe=_SAFE_IN_URL)
    if not target.startswith("/") or not is_target(target):
        raise MalformedMessage("the URL cannot be requested")
    return Destination(Origin(normal_host(host), port or (443 if tls else 80), tls), target)
