"""`curl`, under the egress policy of the sandbox."""

from __future__ import annotations

import asyncio
import base64
import posixpath
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from smokebox.errors import PathError
from smokebox.sandbox.virtual.commands.curl_body import CurlBody, make_body, read_input
from smokebox.sandbox.virtual.commands.curl_options import (
    CurlOptions,
    CurlUsageError,
    parse_options,
)
from smokebox.sandbox.virtual.commands.curl_write_out import write_out
from smokebox.sandbox.virtual.connection import FetchFailed, Head
from smokebox.sandbox.virtual.fetch import FetchRequest

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandStream, StreamingCommand
    from smokebox.sandbox.virtual.fetch import EgressClient, FetchResponse, Hop

_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_DELAY = 600.0
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
        return await _all(call, client, options)

    return curl


@dataclass(slots=True)
class CurlTransfer:
    """State of the transfer of one URL."""

    url: str
    output: str | None
    started: float = field(default_factory=time.monotonic)
    hops: list[Hop] = field(default_factory=list)
    size: int = 0
    error: FetchFailed | None = None
    held: bytearray = field(default_factory=bytearray)


async def _all(call: CommandStream, client: EgressClient, options: CurlOptions) -> int:
    code = 0
    for index, url in enumerate(options.urls):
        transfer = CurlTransfer(url, "-")
        try:
            transfer.output = _destination(url, options, index)
            await _with_retries(call, client, options, transfer)
        except FetchFailed as error:
            transfer.error = error
            if options.show_error or not options.silent:
                await call.write_error(f"curl: ({error.exit_code}) {error}\n")
        if options.write_out:
            await write_out(call, options.write_out, transfer)
        code = transfer.error.exit_code if transfer.error else 0
    return code


def _destination(url: str, options: CurlOptions, index: int) -> str | None:
    """Return the file to write the body to, or None for stdout."""
    if index >= len(options.outputs):
        return None
    given = options.outputs[index]
    if given == "-":
        return None
    if given is not None:
        return given
    path = url.partition("://")[2].partition("?")[0].partition("#")[0]
    name = unquote(path.rpartition("/")[2]) if "/" in path else ""
    if not name or "/" in name or name in (".", ".."):
        raise FetchFailed(23, "Remote file name has no length")
    return name


async def _with_retries(
    call: CommandStream, client: EgressClient, options: CurlOptions, transfer: CurlTransfer
) -> None:
    request = await _request(call, options, transfer.url)
    for attempt in range(options.retry + 1):
        last = attempt == options.retry
        transfer.held.clear()
        try:
            retry_after = await _once(call, client, options, transfer, request, last)
            if retry_after is None:
                return await _save(call, options, transfer)
        except FetchFailed as error:
            refused = error.exit_code == 7 and options.retry_refused
            if last or not (error.exit_code == 28 or refused or options.retry_all):
                raise
            retry_after = 0.0
        delay = options.retry_delay or max(retry_after, float(2**attempt))
        await asyncio.sleep(min(delay, _LONGEST_DELAY))


async def _once(
    call: CommandStream,
    client: EgressClient,
    options: CurlOptions,
    transfer: CurlTransfer,
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
    call: CommandStream, options: CurlOptions, transfer: CurlTransfer, response: FetchResponse
) -> None:
    """Write the response heads to each destination that the options name."""
    heads = b"".join(_head_bytes(sent.head) for sent in response.hops)
    if options.verbose:
        for sent in response.hops:
            await call.write_error(_conversation(sent))
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


def _conversation(sent: Hop) -> str:
    lines = [f"> {sent.method} {sent.url.target} HTTP/1.1"]
    lines += [f"> {name}: {value}" for name, value in sent.headers]
    lines += [">", *(f"< {line}" for line in _head_bytes(sent.head).decode().split("\r\n")[:-2])]
    return "\n".join([*lines, "<", ""])


async def _emit(call: CommandStream, transfer: CurlTransfer, data: bytes) -> None:
    if transfer.output is None:
        await call.write(data)
    elif transfer.output == "/dev/stderr":
        await call.write_error(data)
    elif transfer.output == "/dev/stdout":
        await call.write(data)
    elif transfer.output != "/dev/null":
        transfer.held += data


async def _save(call: CommandStream, options: CurlOptions, transfer: CurlTransfer) -> None:
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


async def _request(call: CommandStream, options: CurlOptions, url: str) -> FetchRequest:
    body = await make_body(call, options)
    url = url if "://" in url else f"http://{url}"
    if options.upload is not None and url.endswith("/"):
        url += posixpath.basename(options.upload)
    if body is not None and options.as_query:
        url += ("&" if "?" in url else "?") + body.data.decode("utf-8", "replace")
        body = None
    return FetchRequest(
        method=options.method or _method(options, body),
        url=url,
        headers=await _headers(call, options, body),
        body=None if body is None else body.data,
        keep_method=options.method is not None,
        redirects=options.max_redirects if options.follow else None,
        timeout=options.max_time or None,
        connect_timeout=options.connect_timeout or None,
        decode=options.compressed,
    )


def _method(options: CurlOptions, body: CurlBody | None) -> str:
    if options.head:
        return "HEAD"
    if options.upload is not None:
        return "PUT"
    return "GET" if body is None else "POST"


async def _headers(
    call: CommandStream, options: CurlOptions, body: CurlBody | None
) -> list[tuple[str, str]]:
    chosen = {"user-agent": ("User-Agent", "curl/8 (smokebox)"), "accept": ("Accept", "*/*")}
    if options.json:
        chosen["accept"] = ("Accept", "application/json")
    if body is not None and body.content_type:
        chosen["content-type"] = ("Content-Type", body.content_type)
    if options.user is not None:
        pair = options.user if ":" in options.user else f"{options.user}:"
        token = base64.b64encode(pair.encode()).decode()
        chosen["authorization"] = ("Authorization", f"Basic {token}")
    given = {
        "User-Agent": options.agent,
        "Referer": options.referer,
        "Cookie": "; ".join(options.cookies) or None,
        "Range": f"bytes={options.byte_range}" if options.byte_range else None,
        "Accept-Encoding": "gzip, deflate" if options.compressed else None,
    }
    chosen |= {name.lower(): (name, value) for name, value in given.items() if value is not None}
    own = await _own_headers(call, options.headers)
    named = {name.lower() for name, _ in own}
    kept = [pair for name, pair in chosen.items() if name not in named]
    return kept + [(name, value) for name, value in own if value is not None]


async def _own_headers(call: CommandStream, given: list[str]) -> list[tuple[str, str | None]]:
    """Apply `-H`: `Name: value` sets, `Name;` sets to empty, `Name:` removes a header."""
    lines: list[str] = []
    for text in given:
        if text.startswith("@"):
            lines += (await read_input(call, text[1:])).decode("utf-8", "replace").splitlines()
        else:
            lines.append(text)
    found: list[tuple[str, str | None]] = []
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found.append((name.strip(), value.strip() or None))
        elif line.endswith(";"):
            found.append((line[:-1].strip(), ""))
    return found
