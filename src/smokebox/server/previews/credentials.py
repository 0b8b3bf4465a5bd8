"""Tokens that a request to a preview shows: a header, a cookie, or a parameter of the URL.

The parameter of a page becomes a cookie by a redirect, so that the token is in no address that the
page, its history or a Referer header could tell. Programs send the header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.foundation.http1.head import write_response
from smokebox.wire.preview import TOKEN_HEADER, TOKEN_PARAMETER

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.foundation.http1.head import Fields, RequestHead

# No page of another host can set a cookie with this prefix, not even for a parent domain.
_COOKIE = "__Host-smokebox-token"
# Browsers keep the other one only over HTTPS, or below localhost.
_HTTP_COOKIE = "smokebox-token"
_FRAMES = frozenset(("iframe", "frame", "embed", "object"))
_PARAMETER = f"{TOKEN_PARAMETER}="


@dataclass(frozen=True, slots=True)
class PreviewCredentials:
    """The tokens in the headers of a request, and its Authorization header."""

    tokens: tuple[str, ...]
    authorization: str

    @classmethod
    def of(cls, head: RequestHead) -> PreviewCredentials:
        """Return the credentials of a request."""
        tokens = []
        for name, value in head.fields:
            name = name.lower()
            if name == TOKEN_HEADER:
                tokens.append(value)
            elif name == "cookie" and _HTTP_COOKIE in value:
                pairs = (pair.strip().partition("=") for pair in value.split(";"))
                tokens += [one for key, _, one in pairs if key in (_COOKIE, _HTTP_COOKIE)]
        return cls(tuple(tokens), head.get("authorization"))


def tokens_in(path: str) -> tuple[str, ...]:
    """Return the values of the parameter in a path with a query."""
    if _PARAMETER not in path:
        return ()
    pairs = path.partition("?")[2].split("&")
    return tuple(pair[len(_PARAMETER) :] for pair in pairs if pair.startswith(_PARAMETER))


def without_tokens(path: str, is_ours: Callable[[str], bool]) -> str:
    """Return a path without the parameters whose token `is_ours`; others are those of the app."""
    before, _, query = path.partition("?")
    kept = [
        pair
        for pair in query.split("&")
        if not (pair.startswith(_PARAMETER) and is_ours(pair[len(_PARAMETER) :]))
    ]
    return f"{before}?{'&'.join(kept)}" if kept else before


def is_navigation(head: RequestHead) -> bool:
    """Tell whether a browser requests a page, which follows redirects and keeps cookies."""
    if head.method not in ("GET", "HEAD") or head.upgrade:
        return False
    mode = head.get("sec-fetch-mode")
    return mode == "navigate" if mode else "text/html" in head.get("accept")


def redirect(path: str, token: str, head: RequestHead, *, https: bool, keep_alive: bool) -> bytes:
    """Return the response that sets the cookie, and leads to the same URL without the token."""
    if path[1:2] in ("/", "\\"):
        # A browser would take the start of such a path for a host.
        path = f"/.{path}"
    fields: Fields = [
        ("location", path),
        ("content-length", "0"),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
    ]
    site = "SameSite=Lax"
    if head.get("sec-fetch-dest") in _FRAMES:
        # Of a page in a frame of another site, browsers send no other cookies.
        site = "SameSite=None; Partitioned"
    fields.append(("set-cookie", f"{_COOKIE}={token}; Path=/; Secure; HttpOnly; {site}"))
    if not https:
        fields.append(("set-cookie", f"{_HTTP_COOKIE}={token}; Path=/; HttpOnly; SameSite=Lax"))
    if not keep_alive:
        fields.append(("connection", "close"))
    return write_response(303, "See Other", fields)
