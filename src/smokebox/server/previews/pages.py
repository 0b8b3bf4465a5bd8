"""What a visitor gets who gets no answer from the sandbox: a page, or JSON for programs."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import msgspec

from smokebox.wire.failure import FailureAnswer, failure_of

if TYPE_CHECKING:
    from smokebox.errors import SmokeboxError

RETRY_SECONDS = 2
_REASONS = {
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    410: b"Gone",
    421: b"Misdirected Request",
    431: b"Request Header Fields Too Large",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
}
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
    401: "This preview is private",
    404: "There is no such preview",
    410: "This preview has ended",
    502: "Nothing answers yet",
    503: "One moment",
}
_RETRIED = (502, 503)


class Refusal(Exception):
    """Why a visitor gets no answer from the sandbox."""

    def __init__(self, status: int, error: SmokeboxError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


def render(refusal: Refusal, *, for_browser: bool, head_only: bool, keep_alive: bool) -> bytes:
    """The whole answer."""
    status = refusal.status
    if for_browser:
        media, body = b"text/html; charset=utf-8", _page(refusal).encode()
    else:
        media, body = (
            b"application/json",
            msgspec.json.encode(FailureAnswer(failure_of(refusal.error))),
        )
    lines = [
        b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"Refused")),
        b"content-type: %b\r\ncontent-length: %d\r\n" % (media, len(body)),
        b"cache-control: no-store\r\n",
        b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'\r\n",
    ]
    if status in _RETRIED:
        lines.append(b"retry-after: %d\r\n" % RETRY_SECONDS)
    if status == 401:
        lines.append(b"www-authenticate: Bearer\r\n")
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)


def _page(refusal: Refusal) -> str:
    error, status = refusal.error, refusal.status
    retried = status in _RETRIED
    hint = f"{error.hint} This page tries again by itself." if retried else error.hint
    return _PAGE.format(
        refresh=f'<meta http-equiv="refresh" content="{RETRY_SECONDS}">\n' if retried else "",
        title=_TITLES.get(status, "This request cannot be answered"),
        message=html.escape(error.message),
        hint=html.escape(hint),
    )
