"""`curl`, under the egress policy of the sandbox."""

from __future__ import annotations

import asyncio
import json
import posixpath
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.egress.urls import join_url
from smokebox.errors import PathError
from smokebox.sandbox.virtual.commands.curl_request import (
    CurlOptions,
    CurlUsageError,
    make_request,
    parse_options,
    read_input,
)
from smokebox.sandbox.virtual.fetch import FetchFailed, FetchRequest, Head, remote_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.sandbox.virtual.command import CommandStream, StreamingCommand
    from smokebox.sandbox.virtual.fetch import EgressClient, FetchResponse, Hop

_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_MAX_DELAY = 600.0
_TOKEN = re.compile(r"%\{([^}]*)\}|%%|\\([ntr\\])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_OFF = (
    "curl: (7) the network is off in this sandbox. Open it with "
    "virtual(egress=['api.github.com']).\n"
)


def curl_on(client: EgressClient | None) -> StreamingCommand:
    """Return the `curl` command; without a client it reports that the network is off."""

    async def curl(call: CommandStream) -> int:
        if client is None:
            await call.write_error(_OFF)
            return 7
        try:
            options = parse_options(call.args)
        except CurlUsageError as error:
            await call.write_error(f"curl: {error}\n")
            return 2
        if not options.urls:
            await call.write_error("curl: (2) no URL specified\n")
            return 2
        return await _run(call, client, options)

    return curl


@dataclass(slots=True)
class _Transfer:
    """State of the transfer of one URL."""

    url: str
    output: str | None
    started: float = field(default_factory=time.monotonic)
    hops: list[Hop] = field(default_factory=list)
    size: int = 0
    error: FetchFailed | None = None
    held: bytearray = field(default_factory=bytearray)


async def _run(call: CommandStream, client: EgressClient, options: CurlOptions) -> int:
    code = 0
    for index, url in enumerate(options.urls):
        transfer = _Transfer(url, "-")
        try:
            transfer.output = _destination(url, options, index)
            await _with_retries(call, client, options, transfer)
        except FetchFailed as error:
            transfer.error = error
            if options.show_error or not options.silent:
                await call.write_error(f"curl: ({error.exit_code}) {error}\n")
        if options.write_out:
            await _write_out(call, options.write_out, transfer)
        code = transfer.error.exit_code if transfer.error else 0
    return code


def _destination(url: str, options: CurlOptions, index: int) -> str | None:
    """Return the file to write the body to, or None for stdout."""
    if index >= len(options.outputs):
        return None
    output = options.outputs[index]
    if output == "-":
        return None
    if output is not None:
        return output
    if name := remote_name(url):
        return name
    raise FetchFailed(23, "Remote file name has no length")


async def _with_retries(
    call: CommandStream, client: EgressClient, options: CurlOptions, transfer: _Transfer
) -> None:
    request = await make_request(call, options, transfer.url)
    for attempt in range(options.retry + 1):
        last = attempt == options.retry
        transfer.held.clear()
        try:
            retry_after = await _attempt(call, client, options, transfer, request, last)
            if retry_after is None:
                return await _save(call, options, transfer)
        except FetchFailed as error:
            refused = error.exit_code == 7 and options.retry_refused
            if last or not (error.exit_code == 28 or refused or options.retry_all):
                raise
            retry_after = 0.0
        delay = options.retry_delay or max(retry_after, float(2**attempt))
        await asyncio.sleep(min(delay, _MAX_DELAY))


async def _attempt(
    call: CommandStream,
    client: EgressClient,
    options: CurlOptions,
    transfer: _Transfer,
    request: FetchRequest,
    last: bool,
) -> float | None:
    """Make one attempt. Return the seconds to wait before a retry, or None when done."""
    async with client.fetch(request) as response:
        transfer.hops = response.hops
        head = response.last.head
        if not last and head.status in _TRANSIENT:
            after = head.get("retry-after") or ""
            return float(after) if after.isdigit() else 0.0
        await _show(call, options, transfer, response)
        failed = head.status >= 400
        if failed and options.fail and not options.fail_with_body:
            raise FetchFailed(22, f"The requested URL returned error: {head.status}")
        if not options.head:
            async for data in response.body:
                transfer.size += len(data)
                await _emit(call, transfer, data)
        if failed and options.fail_with_body:
            await _save(call, options, transfer)
            raise FetchFailed(22, f"The requested URL returned error: {head.status}")
    return None


async def _show(
    call: CommandStream, options: CurlOptions, transfer: _Transfer, response: FetchResponse
) -> None:
    """Write the response heads to each destination that the options name."""
    heads = b"".join(_head_bytes(hop.head) for hop in response.hops)
    if options.verbose:
        for hop in response.hops:
            await call.write_error(_verbose_text(hop))
    if options.dump_header is not None:
        if options.dump_header == "-":
            await call.write(heads)
        else:
            _write_file(call, options, options.dump_header, heads)
    if options.include or options.head:
        await _emit(call, transfer, heads)


def _head_bytes(head: Head) -> bytes:
    lines = [f"HTTP/{head.version} {head.status} {head.reason}".rstrip()]
    lines += [f"{name}: {value}" for name, value in head.headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _verbose_text(hop: Hop) -> str:
    lines = [f"> {hop.method} {hop.url.target} HTTP/1.1"]
    lines += [f"> {name}: {value}" for name, value in hop.headers]
    lines += [">", *(f"< {line}" for line in _head_bytes(hop.head).decode().split("\r\n")[:-2])]
    return "\n".join([*lines, "<", ""])


async def _emit(call: CommandStream, transfer: _Transfer, data: bytes) -> None:
    if transfer.output in (None, "/dev/stdout"):
        await call.write(data)
    elif transfer.output == "/dev/stderr":
        await call.write_error(data)
    elif transfer.output != "/dev/null":
        transfer.held += data


async def _save(call: CommandStream, options: CurlOptions, transfer: _Transfer) -> None:
    if transfer.output is not None and not transfer.output.startswith("/dev/"):
        _write_file(call, options, transfer.output, bytes(transfer.held))


def _write_file(call: CommandStream, options: CurlOptions, name: str, data: bytes) -> None:
    path = call.path(name)
    if not options.create_dirs and not call.files.exists(posixpath.dirname(path)):
        raise FetchFailed(23, f"Failure writing output to {name}: No such file or directory")
    try:
        call.files.write(path, data)
    except PathError as error:
        raise FetchFailed(23, f"Failure writing output to {name}: {error.reason}") from None


async def _write_out(call: CommandStream, template: str, transfer: _Transfer) -> None:
    """Print the template to stdout, or after `%{stderr}` to stderr."""
    if template.startswith("@"):
        template = (await read_input(call, template[1:])).decode("utf-8", "replace")
    write = call.write
    for part in re.split(r"(%\{std(?:err|out)\})", template):
        if part in ("%{stderr}", "%{stdout}"):
            write = call.write_error if part == "%{stderr}" else call.write
        elif part:
            await write(_expand(part, transfer))


def _expand(template: str, transfer: _Transfer) -> str:
    """Expand the template; unknown variables are empty."""

    def expand(match: re.Match[str]) -> str:
        if match[1] is not None:
            return _variable(match[1], transfer)
        return _ESCAPES[match[2]] if match[2] else "%"

    return _TOKEN.sub(expand, template)


def _variable(name: str, transfer: _Transfer) -> str:
    if name.startswith("time_"):
        whole = name == "time_total"
        return f"{time.monotonic() - transfer.started if whole else 0:.6f}"
    if name.startswith("header_json"):
        return _header_json(transfer)
    known = _VARIABLES.get(name)
    return known(transfer) if known else ""


def _header_json(transfer: _Transfer) -> str:
    headers: dict[str, list[str]] = {}
    for key, value in transfer.hops[-1].head.headers if transfer.hops else ():
        headers.setdefault(key.lower(), []).append(value)
    return json.dumps(headers)


def _status(transfer: _Transfer) -> str:
    return f"{transfer.hops[-1].head.status if transfer.hops else 0:03d}"


def _redirect_url(transfer: _Transfer) -> str:
    last = transfer.hops[-1] if transfer.hops else None
    location = last.head.get("location") if last else None
    return join_url(last.url, location) if last and location else ""


def _last(transfer: _Transfer, name: str) -> str:
    return (transfer.hops[-1].head.get(name) or "") if transfer.hops else ""


_VARIABLES: dict[str, Callable[[_Transfer], str]] = {
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
