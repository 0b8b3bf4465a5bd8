"""URLs in normal form. What two programs could read differently is refused."""

from __future__ import annotations

import ipaddress
import re
import string
from dataclasses import dataclass
from urllib.parse import quote

from smokebox.errors import InvalidOption

_DEFAULT_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"(?P<host>\[[^\]@]*\]|[^:\[\]@]*)(:(?P<port>[0-9]{0,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Encoded (also twice) slash, backslash, dot, and control characters.
_HIDDEN = re.compile(r"%(25)*(2f|5c|2e|[01][0-9a-f]|7f)", re.IGNORECASE)
# `0x7f.1`, `2130706433`, `017700000001`: addresses that resolvers accept and people misread.
_ODD_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
_SAFE = string.punctuation


@dataclass(frozen=True, slots=True)
class Url:
    """An http or https URL in normal form: lower-case host, explicit port, no fragment."""

    scheme: str
    host: str
    port: int
    path: str = "/"
    query: str = ""

    @property
    def authority(self) -> str:
        """Host and port as the Host header wants them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = self.port == _DEFAULT_PORTS.get(self.scheme)
        return host if default else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{self.scheme}://{self.authority}"

    @property
    def target(self) -> str:
        """Path and query, as they stand in a request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def shown(self) -> str:
        """The URL without its query, for messages."""
        return f"{self.origin}{self.path}"

    def __str__(self) -> str:
        return f"{self.origin}{self.target}"


def parse_url(text: str) -> Url:
    """Parse an absolute URL. Raises `InvalidOption` where it could be read in two ways."""
    if any(c <= " " or c == "\x7f" for c in text) or "\\" in text:
        raise _ambiguous("a URL holds no spaces, control characters or backslashes")
    scheme, mark, rest = text.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in _DEFAULT_PORTS:
        raise _ambiguous("only http:// and https:// URLs can be used")
    end = min((rest.find(c) for c in "/?#" if c in rest), default=len(rest))
    authority = _AUTHORITY.fullmatch(rest[:end])
    if not authority:
        raise _ambiguous("the host and port cannot be read, or a user name stands before them")
    host = authority["host"].lower()
    path, _, query = rest[end:].partition("#")[0].partition("?")
    return Url(
        scheme,
        _check_host(host),
        _check_port(authority["port"], scheme),
        _check_path(path),
        quote(query, safe=_SAFE),
    )


def join_url(base: Url, reference: str) -> str:
    """Resolve a redirect to an absolute URL, which still has to be parsed and judged."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", reference):
        return reference
    if reference.startswith("//"):
        return f"{base.scheme}:{reference}"
    if reference.startswith("/"):
        return f"{base.origin}{reference}"
    if reference.startswith("?"):
        return f"{base.origin}{base.path}{reference}"
    return f"{base.origin}{_without_dots(base.path.rpartition('/')[0] + '/' + reference)}"


def _ambiguous(message: str) -> InvalidOption:
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
    port = int(text) if text else _DEFAULT_PORTS[scheme]
    if not 0 < port < 65536:
        raise _ambiguous("the port is not between 1 and 65535")
    return port


def _check_host(host: str) -> str:
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise _ambiguous("the IPv6 address cannot be read") from None
    name = host.removesuffix(".")
    labels = name.split(".")
    if not name or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _ambiguous("the host name is empty or holds characters other than a-z 0-9 - .")
    if _ODD_NUMBER.fullmatch(labels[-1]):
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            raise _ambiguous("the address is not four plain numbers") from None
    return name


def _check_path(path: str) -> str:
    if _PERCENT.search(path):
        raise _ambiguous("the path holds a '%' that encodes nothing")
    if _HIDDEN.search(path):
        raise _ambiguous("the path hides a slash, backslash, dot or control character")
    # `..;x` is a dot segment to servers that cut path parameters.
    if any(name.partition(";")[0] in (".", "..") for name in path.split("/")):
        raise _ambiguous("the path holds '.' or '..' segments")
    return quote(path, safe=_SAFE) or "/"
