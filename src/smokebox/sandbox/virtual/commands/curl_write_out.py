"""Output of `curl -w`: text with `%{variables}` and backslash escapes."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

from smokebox.egress.urls import join_url
from smokebox.sandbox.virtual.commands.curl_body import read_input

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.sandbox.virtual.command import CommandStream
    from smokebox.sandbox.virtual.commands.curl import CurlTransfer

_TOKEN = re.compile(r"%\{([^}]*)\}|%%|\\([ntr\\])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


async def write_out(call: CommandStream, template: str, transfer: CurlTransfer) -> None:
    """Print the template to stdout, or after `%{stderr}` to stderr."""
    if template.startswith("@"):
        template = (await read_input(call, template[1:])).decode("utf-8", "replace")
    write = call.write
    for part in re.split(r"(%\{std(?:err|out)\})", template):
        if part in ("%{stderr}", "%{stdout}"):
            write = call.write_error if part == "%{stderr}" else call.write
        elif part:
            await write(expand(part, transfer))


def expand(template: str, transfer: CurlTransfer) -> str:
    """Expand the template; unknown variables are empty."""

    def one(match: re.Match[str]) -> str:
        if match[1] is not None:
            return _variable(match[1], transfer)
        return _ESCAPES[match[2]] if match[2] else "%"

    return _TOKEN.sub(one, template)


def _variable(name: str, transfer: CurlTransfer) -> str:
    if name.startswith("time_"):
        whole = name == "time_total"
        return f"{time.monotonic() - transfer.started if whole else 0:.6f}"
    if name.startswith("header_json"):
        return _header_json(transfer)
    known = _VARIABLES.get(name)
    return known(transfer) if known else ""


def _header_json(transfer: CurlTransfer) -> str:
    headers: dict[str, list[str]] = {}
    for key, value in transfer.hops[-1].head.headers if transfer.hops else ():
        headers.setdefault(key.lower(), []).append(value)
    return json.dumps(headers)


def _status(transfer: CurlTransfer) -> str:
    return f"{transfer.hops[-1].head.status if transfer.hops else 0:03d}"


def _redirect_url(transfer: CurlTransfer) -> str:
    last = transfer.hops[-1] if transfer.hops else None
    location = last.head.get("location") if last else None
    return join_url(last.url, location) if last and location else ""


def _last(transfer: CurlTransfer, name: str) -> str:
    return (transfer.hops[-1].head.get(name) or "") if transfer.hops else ""


_VARIABLES: dict[str, Callable[[CurlTransfer], str]] = {
    "http_code": _status,
    "response_code": _status,
    "http_version": lambda t: t.hops[-1].head.version if t.hops else "0",
    "content_type": lambda t: _last(t, "content-type"),
    "size_download": lambda t: str(t.size),
    "url": lambda t: t.url,
    "url_effective": lambda t: str(t.hops[-1].url) if t.hops else t.url,
    "scheme": lambda t: t.hops[-1].url.scheme if t.hops else "",
    "method": lambda t: t.hops[-1].method if t.hops else "",
    "num_redirects": lambda t: str(max(len(t.hops) - 1, 0)),
    "num_headers": lambda t: str(len(t.hops[-1].head.headers) if t.hops else 0),
    "num_connects": lambda t: str(len(t.hops)),
    "redirect_url": _redirect_url,
    "filename_effective": lambda t: t.output or "",
    "exitcode": lambda t: str(t.error.exit_code if t.error else 0),
    "errormsg": lambda t: str(t.error or ""),
}
