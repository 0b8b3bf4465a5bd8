"""Headers of requests and responses as the preview proxy forwards them.

Hop-by-hop headers are gone already: `foundation.http1.head` keeps them apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.foundation.http1.head import HOP_BY_HOP
from smokebox.wire.preview import TOKEN_HEADER

if TYPE_CHECKING:
    from smokebox.foundation.http1.head import Fields, RequestHead

# The proxy sets these itself; a client's own are not believed.
_FORWARDED = frozenset(
    (
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-port",
        "x-forwarded-prefix",
        "x-forwarded-proto",
        "x-forwarded-server",
        "x-original-url",
        "x-real-ip",
    )
)
# Many servers treat an underscore as a hyphen.
_DROPPED = _FORWARDED | HOP_BY_HOP | {TOKEN_HEADER}
# Applies to a whole origin, which previews in the path form share.
_ORIGIN_WIDE = frozenset(("service-worker-allowed", "clear-site-data", "strict-transport-security"))
_API_KEY = re.compile(r"bearer\s+sbx_", re.IGNORECASE)
_OWN_COOKIE = "smokebox"
_OWN_COOKIES = (_OWN_COOKIE, f"__Host-{_OWN_COOKIE}")
# Of these policies, the pages of an app may choose one. Others tell its address to other sites.
_PRIVATE_REFERRER = ("no-referrer", "same-origin")
# In the path form a page shares the origin of the API, so it gets an opaque origin.
_OPAQUE_ORIGIN = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedFor:
    """The client's address and the URL it used; `prefix` is the part of the path before the app's.

    Only the path form of a preview has a prefix.
    """

    client: str
    proto: str
    host: str
    prefix: str = ""


def request_fields(head: RequestHead, forwarded: ForwardedFor) -> Fields:
    """Return the headers of a request as the app gets them, including its framing."""
    fields: Fields = [("host", forwarded.host)]
    for field in head.fields:
        name, value = field[0].lower(), field[1]
        if (name.replace("_", "-") if "_" in name else name) in _DROPPED:
            continue
        if name == "cookie":
            value = _without_own_cookies(value)
            if not value:
                continue
        elif name == "authorization" and _API_KEY.match(value):
            continue
        fields.append((name, value))
    fields += _forwarded_fields(forwarded)
    if head.upgrade:
        fields += [("connection", "upgrade"), ("upgrade", "websocket")]
    elif head.framing == "chunked":
        fields.append(("transfer-encoding", "chunked"))
    elif "content-length" in head.own:
        fields.append(("content-length", str(head.framing)))
    return fields


def response_fields(
    fields: Fields, forwarded: ForwardedFor, *, token_in_url: bool = False
) -> Fields:
    """Return the headers of an app's response as the client gets them, without the framing.

    Args:
        token_in_url: The URL of the request has the token, which no Referer may tell.
    """
    prefix = forwarded.prefix
    kept: Fields = []
    has_origin = False
    # Not "no-referrer": a form would be sent with `Origin: null`, which many apps refuse.
    referrer = "same-origin"
    for field in fields:
        name, value = field[0].lower(), field[1]
        if name == "set-cookie":
            value = _confined_cookie(value, prefix)
            if not value:
                continue
        elif name == "referrer-policy":
            # A browser follows the last policy in it that it knows.
            chosen = value.rpartition(",")[2].strip().lower()
            referrer = chosen if chosen in _PRIVATE_REFERRER else "same-origin"
            continue
        elif name == "alt-svc":
            # It would lead the client past this proxy.
            continue
        elif prefix:
            has_origin = has_origin or name == "access-control-allow-origin"
            if name in _ORIGIN_WIDE:
                continue
            if name in ("location", "content-location"):
                value = _prefixed(value, forwarded)
        kept.append((name, value))
    if prefix or token_in_url:
        referrer = "no-referrer"
    kept.append(("referrer-policy", referrer))
    if prefix:
        kept.append(("content-security-policy", _OPAQUE_ORIGIN))
        if not has_origin:
            # Scripts of a page with an opaque origin are requested with `Origin: null`.
            kept.append(("access-control-allow-origin", "*"))
    return kept


def _forwarded_fields(forwarded: ForwardedFor) -> Fields:
    client, host, proto = forwarded.client, forwarded.host, forwarded.proto
    node = f'"[{client}]"' if ":" in client else client
    fields = [
        ("x-forwarded-for", client),
        ("x-forwarded-host", host),
        ("x-forwarded-proto", proto),
        ("forwarded", f'for={node};host="{host}";proto={proto}'),
    ]
    if forwarded.prefix:
        fields.append(("x-forwarded-prefix", forwarded.prefix))
    return fields


def _without_own_cookies(value: str) -> str:
    """Remove the server's own cookies from a Cookie header."""
    if _OWN_COOKIE not in value:
        return value
    pairs = (pair.strip() for pair in value.split(";"))
    return "; ".join(pair for pair in pairs if not pair.startswith(_OWN_COOKIES))


def _confined_cookie(value: str, prefix: str) -> str:
    """Confine a cookie to the preview's host and path; empty for one named as the server's own."""
    first, *attributes = value.split(";")
    if first.lstrip("= \t").startswith(_OWN_COOKIES):
        return ""
    dropped = ("domain", "path") if prefix else ("domain",)
    kept = [one for one in attributes if not one.strip().lower().startswith(dropped)]
    if prefix:
        kept.append(f" Path={prefix}")
    return ";".join([first, *kept])


def _prefixed(location: str, forwarded: ForwardedFor) -> str:
    """Put the prefix of the path form before the target of a redirect within the app."""
    for scheme in ("http://", "https://", "//"):
        start = scheme + forwarded.host
        if location.startswith(start) and location[len(start) : len(start) + 1] in ("", "/", "?"):
            location = location.removeprefix(start) or "/"
            break
    if location.startswith("/") and not location.startswith("//"):
        return forwarded.prefix + location[1:]
    return location
