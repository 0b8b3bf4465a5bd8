"""URLs and origins in normal form. URLs that two programs could parse differently are refused."""

from __future__ import annotations

import ipaddress
import re
import string
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from smokebox.egress.pattern import normal_host
from smokebox.errors import InvalidOption

DEFAULT_PORTS = {"http": 80, "https": 443}

_AUTHORITY = re.compile(r"(?P<host>\[[^\]@]*\]|[^:\[\]@]*)(:(?P<port>[0-9]{0,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Encoded (also twice) slash, backslash, dot, and control characters.
_HIDDEN = re.compile(r"%(25)*(2f|5c|2e|[01][0-9a-f]|7f)", re.IGNORECASE)
# `0x7f.1`, `2130706433`, `017700000001`: addresses that resolvers accept and people misread.
_ODD_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
_SAFE = string.punctuation
# Characters that RFC 3986 allows in a path or query.
_ALLOWED = "!$%&'()*+,/:;=?@[]~-._"


@dataclass(frozen=True, slots=True)
class Origin:
    """A server: scheme, host as `normal_host` returns it, and port."""

    scheme: str
    host: str
    port: int

    @property
    def tls(self) -> bool:
        """True for https."""
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them, without a default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = self.port == DEFAULT_PORTS.get(self.scheme)
        return host if default else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@dataclass(frozen=True, slots=True)
class Url:
    """An http or https URL in normal form: lower-case host, explicit port, no fragment."""

    scheme: str
    host: str
    port: int
    path: str = "/"
    query: str = ""

    @property
    def server(self) -> Origin:
        """The origin as an object."""
        return Origin(self.scheme, self.host, self.port)

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them, without a default port."""
        return self.server.authority

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return str(self.server)

    @property
    def target(self) -> str:
        """Path and query, as in a request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def __str__(self) -> str:
        return f"{self.origin}{self.target}"


def parse_url(text: str) -> Url:
    """Parse an absolute URL. Raises `InvalidOption` if it is ambiguous."""
    if any(c <= " " or c == "\x7f" for c in text) or "\\" in text:
        raise _invalid("a URL has no spaces, control characters or backslashes")
    scheme, mark, rest = text.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in DEFAULT_PORTS:
        raise _invalid("only http:// and https:// URLs can be used")
    end = min((rest.find(c) for c in "/?#" if c in rest), default=len(rest))
    authority = _AUTHORITY.fullmatch(rest[:end])
    if not authority:
        raise _invalid("the host and port are not valid, or have a user name before them")
    host = authority["host"].lower()
    path, _, query = rest[end:].partition("#")[0].partition("?")
    return Url(
        scheme,
        _check_host(host),
        _check_port(authority["port"], scheme),
        _check_path(path),
        quote(query, safe=_SAFE),
    )


def split_url(text: str) -> Url:
    """Split an absolute URL of a trusted source, with any path. Raises `InvalidOption`."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in DEFAULT_PORTS or not host or parts.username is not None:
        raise _invalid("the URL is not http:// or https:// with a host")
    path = quote(parts.path or "/", safe=_ALLOWED)
    if not path.startswith("/"):
        raise _invalid("the path of the URL does not start with a slash")
    return Url(
        parts.scheme,
        normal_host(host),
        port or DEFAULT_PORTS[parts.scheme],
        path,
        quote(parts.query, safe=_ALLOWED),
    )


def join_url(base: Url, reference: str) -> str:
    """Resolve a redirect to an absolute URL, which still has to be parsed and checked."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", reference):
        return reference
    if reference.startswith("//"):
        return f"{base.scheme}:{reference}"
    if reference.startswith("/"):
        return f"{base.origin}{reference}"
    if reference.startswith("?"):
        return f"{base.origin}{base.path}{reference}"
    return f"{base.origin}{_without_dots(base.path.rpartition('/')[0] + '/' + reference)}"


def _invalid(message: str) -> InvalidOption:
    return InvalidOption(message, option="url")


def _without_dots(path: str) -> str:
    path, mark, query = path.partition("?")
    kept: list[str] = []
    names = path.split("/")[1:]
    for name in names:
        if name == "..":
            del kept[-1:]
        elif name != ".":
            kept.append(name)
    if names and names[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept) + mark + query


def _check_port(text: str | None, scheme: str) -> int:
    port = int(text) if text else DEFAULT_PORTS[scheme]
    if not 0 < port < 65536:
        raise _invalid("the port is not between 1 and 65535")
    return port


def _check_host(host: str) -> str:
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise _invalid("the IPv6 address is not valid") from None
    name = host.removesuffix(".")
    labels = name.split(".")
    if not name or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _invalid("the host name is empty or has characters other than a-z 0-9 - .")
    if _ODD_NUMBER.fullmatch(labels[-1]):
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            raise _invalid("the address is not four plain numbers") from None
    return name


def _check_path(path: str) -> str:
    if _PERCENT.search(path):
        raise _invalid("the path has a '%' that encodes nothing")
    if _HIDDEN.search(path):
        raise _invalid("the path has an encoded slash, backslash, dot or control character")
    # `..;x` is a dot segment to servers that cut path parameters.
    if any(name.partition(";")[0] in (".", "..") for name in path.split("/")):
        raise _invalid("the path has '.' or '..' segments")
    return quote(path, safe=_SAFE) or "/"
