"""The heads of requests and answers on their way through, without what is for one hop only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Headers = list[tuple[bytes, bytes]]

# What says something about one connection, and not about what is asked or answered.
_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# What we say ourselves; nobody else is believed.
_FORWARDED = frozenset(
    (
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-forwarded-proto",
        b"x-forwarded-server",
        b"x-original-url",
        b"x-real-ip",
    )
)
_NOT_ASKED = _HOP | _FORWARDED | {b"expect", b"content-length", b"host"}
# Other ways to this host, which are not ways to the preview.
_NOT_ANSWERED = _HOP | {b"alt-svc", b"content-length"}
# What holds for a whole origin, which previews in their path form share.
_OF_ORIGIN = frozenset(
    (b"service-worker-allowed", b"clear-site-data", b"strict-transport-security")
)
_KEY = re.compile(rb"bearer\s+sbx_", re.IGNORECASE)
_OURS = b"smokebox"
_NOTHING: frozenset[bytes] = frozenset()
# A page of a sandbox beside the API is to be of no origin, so that it is not of the API's.
_APART = b"sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"


@dataclass(slots=True)
class Asked:
    """The head of a request. `known` are its headers by name in lower case, the last of each."""

    method: bytes = b""
    target: bytes = b""
    headers: Headers = field(default_factory=list)
    known: dict[bytes, bytes] = field(default_factory=dict)
    old: bool = False
    keep_alive: bool = True
    upgrade: bool = False

    @property
    def chunked(self) -> bool:
        """Whether its body comes without telling how long it is."""
        return b"transfer-encoding" in self.known

    @property
    def has_body(self) -> bool:
        """Whether anything follows."""
        return self.chunked or self.known.get(b"content-length", b"0").strip(b"0") != b""

    @property
    def for_browser(self) -> bool:
        """Whether a person looks at the answer."""
        return b"text/html" in self.known.get(b"accept", b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a request came: from whom, by which name, and what of its path is not the app's."""

    client: bytes
    proto: bytes
    host: bytes
    prefix: bytes = b""


def request_fields(asked: Asked, way: Way) -> bytes:
    """A request as the sandbox gets it, from its second line on."""
    named = _named(asked.known)
    lines = [b"host: %b\r\n" % way.host]
    for name, value in asked.headers:
        # To many a server an underscore is a hyphen.
        plain = name.replace(b"_", b"-") if b"_" in name else name
        if plain in _NOT_ASKED or name in named:
            continue
        if name == b"cookie":
            value = _foreign_cookies(value)
            if not value:
                continue
        elif name == b"authorization" and _KEY.match(value):
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    lines.append(_forwarded(way))
    if asked.upgrade:
        lines.append(b"connection: upgrade\r\nupgrade: websocket\r\n")
    elif asked.chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif (length := asked.known.get(b"content-length")) is not None:
        lines.append(b"content-length: %b\r\n" % length)
    lines.append(b"\r\n")
    return b"".join(lines)


def answer_head(
    status: int,
    reason: bytes,
    headers: Headers,
    known: dict[bytes, bytes],
    *,
    framing: bytes,
    prefix: bytes,
    origin: bytes,
) -> bytes:
    """An answer as who asked gets it; `framing` are the lines that say where it ends.

    In the path form, `prefix` is what paths begin with outside, and `origin` the host.
    """
    named = _named(known)
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
    for name, value in headers:
        if name in _NOT_ANSWERED or name in named:
            continue
        if name == b"set-cookie":
            value = _own_cookie(value, prefix)
            if not value:
                continue
        elif prefix:
            if name in _OF_ORIGIN:
                continue
            if name in (b"location", b"content-location"):
                value = _outside(value, prefix, origin)
        lines.append(b"%b: %b\r\n" % (name, value))
    if prefix:
        lines.append(b"content-security-policy: %b\r\n" % _APART)
        if b"access-control-allow-origin" not in known:
            # Scripts of a page without an origin are asked for from nowhere.
            lines.append(b"access-control-allow-origin: *\r\n")
    lines.append(framing)
    lines.append(b"\r\n")
    return b"".join(lines)


def _named(known: dict[bytes, bytes]) -> frozenset[bytes]:
    """The headers that the header Connection says are for this hop."""
    told = known.get(b"connection")
    if told is None or told in (b"keep-alive", b"close", b"Upgrade", b"upgrade"):
        return _NOTHING
    return frozenset(one.strip().lower() for one in told.split(b",")) - {b"content-type", b"cookie"}


def _forwarded(way: Way) -> bytes:
    node = b'"[%b]"' % way.client if b":" in way.client else way.client
    lines = (
        b"x-forwarded-for: %b\r\nx-forwarded-host: %b\r\nx-forwarded-proto: %b\r\n"
        b'forwarded: for=%b;host="%b";proto=%b\r\n'
        % (way.client, way.host, way.proto, node, way.host, way.proto)
    )
    return lines + b"x-forwarded-prefix: %b\r\n" % way.prefix if way.prefix else lines


def _foreign_cookies(value: bytes) -> bytes:
    """Cookies without those that are the server's own."""
    if _OURS not in value:
        return value
    pairs = (pair.strip() for pair in value.split(b";"))
    return b"; ".join(pair for pair in pairs if not pair.startswith(_OURS))


def _own_cookie(value: bytes, prefix: bytes) -> bytes:
    """A cookie for the host of the preview and nobody else; b"" for one that is the server's."""
    first, *attributes = value.split(b";")
    if first.lstrip().startswith(_OURS):
        return b""
    kept = [one for one in attributes if not one.strip().lower().startswith(b"domain")]
    if prefix:
        kept = [one for one in kept if not one.strip().lower().startswith(b"path")]
        kept.append(b" Path=%b" % prefix)
    return b";".join([first, *kept])


def _outside(value: bytes, prefix: bytes, origin: bytes) -> bytes:
    """Where a redirect leads, seen from outside."""
    for scheme in (b"http://", b"https://", b"//"):
        start = scheme + origin
        if value.startswith(start) and value[len(start) : len(start) + 1] in (b"", b"/", b"?"):
            value = value.removeprefix(start) or b"/"
            break
    if value.startswith(b"/") and not value.startswith(b"//"):
        return prefix + value[1:]
    return value
