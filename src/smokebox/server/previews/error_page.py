"""Responses of the proxy itself, if the app gives none: a page for browsers, else JSON."""

from __future__ import annotations

import html
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from smokebox.foundation.http1.head import write_response
from smokebox.wire.failure import FailureResponse, failure_of

if TYPE_CHECKING:
    from smokebox.errors import SmokeboxError
    from smokebox.foundation.http1.head import Fields

RETRY_SECONDS = 2
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 15vh auto 0; max-width: 34rem;
  padding: 0 1rem; color: #222; background: #fff }}
p {{ color: #666 }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #181818 }}
  p {{ color: #999 }} }}
</style>
<h1>{title}</h1>
<p>{message}</p>
<p>{hint}</p>
</html>
"""
_TITLES = {
    401: "This preview needs a token or a key",
    404: "Preview not found",
    410: "This preview has ended",
    502: "Nothing responds yet",
    503: "The server is restarting",
    504: "No response in time",
}
_RETRIED = (502, 503)


class Refusal(Exception):
    """A request that the proxy refuses, or that has no response from the app."""

    def __init__(self, status: int, error: SmokeboxError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


def render(refusal: Refusal, *, for_browser: bool, head_only: bool, keep_alive: bool) -> bytes:
    """Return the whole response to a refused request."""
    status = refusal.status
    if for_browser:
        media_type, body = "text/html; charset=utf-8", _page(refusal).encode()
    else:
        failure = FailureResponse(failure_of(refusal.error))
        media_type, body = "application/json", msgspec.json.encode(failure)
    fields: Fields = [
        ("content-type", media_type),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
        ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),
    ]
    if status in _RETRIED:
        fields.append(("retry-after", str(RETRY_SECONDS)))
    if status == 401:
        fields.append(("www-authenticate", "Bearer"))
    if not keep_alive:
        fields.append(("connection", "close"))
    head = write_response(status, HTTPStatus(status).phrase, fields)
    return head if head_only else head + body


def _page(refusal: Refusal) -> str:
    error, status = refusal.error, refusal.status
    retried = status in _RETRIED
    hint = f"{error.hint} This page reloads by itself." if retried else error.hint
    return _PAGE.format(
        refresh=f'<meta http-equiv="refresh" content="{RETRY_SECONDS}">\n' if retried else "",
        title=_TITLES.get(status, "This request was refused"),
        message=html.escape(error.message),
        hint=html.escape(hint),
    )
