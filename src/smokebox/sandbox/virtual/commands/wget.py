"""`wget` for downloads of single files."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.virtual.fetch import FetchFailed, FetchRequest, remote_name

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandStream, StreamingCommand
    from smokebox.sandbox.virtual.fetch import EgressClient, FetchResponse

_OFF = (
    "wget: the network is off in this sandbox. Open it with virtual(egress=['api.github.com']).\n"
)
_VALUES = {
    "-O": "output", "--output-document": "output", "-P": "directory",
    "--directory-prefix": "directory", "--header": "header", "-U": "agent",
    "--user-agent": "agent", "--post-data": "data", "--post-file": "file",
    "--body-data": "data", "--body-file": "file", "--method": "method",
    "-T": "timeout", "--timeout": "timeout", "-t": "ignored", "--tries": "ignored",
    "-w": "ignored", "--wait": "ignored",
}  # fmt: skip
_FLAGS = {
    "-q": "quiet", "--quiet": "quiet", "-nv": "ignored", "--no-verbose": "ignored",
    "-S": "show_head", "--server-response": "show_head", "--spider": "spider",
    "-nc": "no_clobber", "--no-clobber": "no_clobber", "--content-on-error": "on_error",
    "--progress=bar": "ignored", "--show-progress": "ignored", "-4": "ignored", "-6": "ignored",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Options:
    urls: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    headers: list[tuple[str, str]] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)


def wget_on(client: EgressClient | None) -> StreamingCommand:
    """Return the `wget` command; without a client it reports that the network is off."""

    async def wget(call: CommandStream) -> int:
        if client is None:
            await call.write_error(_OFF)
            return 4
        try:
            options = _parse(call.args)
        except ValueError as error:
            await call.write_error(f"wget: {error}\n")
            return 2
        codes = [await _download(call, client, options, url) for url in options.urls]
        return next((code for code in codes if code), 0)

    return wget


def _parse(words: list[str]) -> _Options:
    options = _Options()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, joined, value = word.partition("=")
        if name not in _VALUES and word[:2] in _VALUES and not word.startswith("--"):
            name, joined, value = word[:2], "=", word[2:]
        if word in _FLAGS:
            options.flags.add(_FLAGS[word])
        elif name in _VALUES:
            if not joined and not rest:
                raise ValueError(f"option requires an argument: '{word}'")
            _take(options, _VALUES[name], value if joined else rest.pop(0))
        elif word.startswith("-q") and len(word) > 2 and not word.startswith("--"):
            options.flags.add("quiet")
            rest.insert(0, f"-{word[2:]}")
        elif word.startswith("-"):
            raise ValueError(f"unrecognized option '{word}'")
        else:
            options.urls.append(word)
    if not options.urls:
        raise ValueError("missing URL")
    return options


def _take(options: _Options, name: str, value: str) -> None:
    if name == "header":
        key, _, content = value.partition(":")
        options.headers.append((key.strip(), content.strip()))
    elif name == "timeout":
        options.values[name] = str(float(value))
    else:
        options.values[name] = value


async def _download(call: CommandStream, client: EgressClient, options: _Options, url: str) -> int:
    try:
        name = _target(call, options, url)
        if name is None:
            return 0
        async with client.fetch(await _request(call, options, url)) as response:
            return await _receive(call, options, response, name)
    except FetchFailed as error:
        if "quiet" not in options.flags:
            await call.write_error(f"wget: {error}\n")
        return {35: 5, 60: 5, 23: 3, 26: 3}.get(error.exit_code, 4)


async def _request(call: CommandStream, options: _Options, url: str) -> FetchRequest:
    body: bytes | None = None
    if "data" in options.values:
        body = options.values["data"].encode()
    elif "file" in options.values:
        try:
            body = call.read_file(options.values["file"])
        except PathError:
            raise FetchFailed(26, f"cannot read {options.values['file']}") from None
    headers = [("User-Agent", options.values.get("agent", "Wget/1 (smokebox)")), ("Accept", "*/*")]
    if body is not None:
        headers.append(("Content-Type", "application/x-www-form-urlencoded"))
    custom = {name.lower() for name, _ in options.headers}
    default = "HEAD" if "spider" in options.flags else "GET" if body is None else "POST"
    timeout = options.values.get("timeout")
    return FetchRequest(
        method=options.values.get("method", default),
        url=url if "://" in url else f"http://{url}",
        headers=[pair for pair in headers if pair[0].lower() not in custom] + options.headers,
        body=body,
        redirects=20,
        timeout=float(timeout) if timeout else None,
    )


def _target(call: CommandStream, options: _Options, url: str) -> str | None:
    """Return the file to write, `-` for stdout, or None to keep an existing file."""
    if "output" in options.values:
        return options.values["output"]
    name = remote_name(url) or "index.html"
    path = posixpath.join(options.values.get("directory", ""), name)
    if not call.files.exists(call.path(path)):
        return path
    if "no_clobber" in options.flags:
        return None
    number = 1
    while call.files.exists(call.path(f"{path}.{number}")):
        number += 1
    return f"{path}.{number}"


async def _receive(
    call: CommandStream, options: _Options, response: FetchResponse, name: str
) -> int:
    head = response.last.head
    if "show_head" in options.flags:
        lines = [f"HTTP/{head.version} {head.status} {head.reason}"]
        lines += [f"{key}: {value}" for key, value in head.headers]
        await call.write_error("".join(f"  {line}\n" for line in lines))
    if head.status >= 400 and "on_error" not in options.flags:
        if "quiet" not in options.flags:
            await call.write_error(f"wget: server returned error: {head.status} {head.reason}\n")
        return 8
    if "spider" in options.flags:
        return 0
    held = bytearray()
    async for data in response.body:
        if name == "-":
            await call.write(data)
        else:
            held += data
    await _save(call, options, name, bytes(held))
    return 8 if head.status >= 400 else 0


async def _save(call: CommandStream, options: _Options, name: str, data: bytes) -> None:
    if name in ("-", "/dev/null"):
        return
    path = call.path(name)
    if "directory" not in options.values and not call.files.exists(posixpath.dirname(path)):
        raise FetchFailed(23, f"{name}: No such file or directory")
    try:
        call.files.write(path, data)
    except PathError as error:
        raise FetchFailed(23, f"{name}: {error.reason}") from None
    if "quiet" not in options.flags:
        await call.write_error(f"'{name}' saved [{len(data)}]\n")
