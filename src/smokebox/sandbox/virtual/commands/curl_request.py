"""The request of a curl command line: its options, headers and body."""

from __future__ import annotations

import base64
import mimetypes
import posixpath
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from smokebox.errors import PathError
from smokebox.sandbox.virtual.fetch import FetchFailed, FetchRequest

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandStream


class CurlUsageError(Exception):
    """Invalid command line; the text is what curl would print."""


@dataclass(slots=True, kw_only=True)
class CurlOptions:
    """Options of one curl command line."""

    urls: list[str] = field(default_factory=list)
    outputs: list[str | None] = field(default_factory=list)
    method: str | None = None
    headers: list[str] = field(default_factory=list)
    # Kind and text of each piece of data: ("d", "a=1"), ("binary", "@file"), ...
    data: list[tuple[str, str]] = field(default_factory=list)
    forms: list[tuple[str, str]] = field(default_factory=list)
    json: bool = False
    upload: str | None = None
    as_query: bool = False
    user: str | None = None
    agent: str | None = None
    cookies: list[str] = field(default_factory=list)
    referer: str | None = None
    byte_range: str | None = None
    silent: bool = False
    show_error: bool = False
    fail: bool = False
    fail_with_body: bool = False
    follow: bool = False
    max_redirects: int = 50
    include: bool = False
    head: bool = False
    dump_header: str | None = None
    verbose: bool = False
    compressed: bool = False
    create_dirs: bool = False
    write_out: str = ""
    max_time: float | None = None
    connect_timeout: float | None = None
    retry: int = 0
    retry_delay: float | None = None
    retry_refused: bool = False
    retry_all: bool = False


Setter = Callable[[CurlOptions, str], None]


def _store(name: str, convert: Callable[[str], object] = str) -> Setter:
    return lambda options, value: setattr(options, name, convert(value))


def _add(name: str) -> Setter:
    return lambda options, value: getattr(options, name).append(value)


def _data(kind: str) -> Setter:
    return lambda options, value: options.data.append((kind, value))


def _form(kind: str) -> Setter:
    return lambda options, value: options.forms.append((kind, value))


def _json(options: CurlOptions, value: str) -> None:
    options.json = True
    options.data.append(("json", value))


def _ignore(options: CurlOptions, value: str) -> None:
    """Accept an option that changes nothing here."""


_SHORT = {
    "a": "append", "A": "user-agent", "b": "cookie", "c": "cookie-jar", "C": "continue-at",
    "d": "data", "D": "dump-header", "e": "referer", "E": "cert", "f": "fail", "F": "form",
    "g": "globoff", "G": "get", "h": "help", "H": "header", "i": "include", "I": "head",
    "J": "remote-header-name", "k": "insecure", "K": "config", "L": "location",
    "m": "max-time", "N": "no-buffer", "o": "output", "O": "remote-name", "q": "disable",
    "r": "range", "s": "silent", "S": "show-error", "T": "upload-file", "u": "user",
    "U": "proxy-user", "v": "verbose", "V": "version", "w": "write-out", "x": "proxy",
    "X": "request", "#": "progress-bar", "0": "http1.0", "4": "ipv4", "6": "ipv6",
}  # fmt: skip

_FLAGS: dict[str, str] = {
    "silent": "silent", "show-error": "show_error", "fail": "fail", "location": "follow",
    "fail-with-body": "fail_with_body", "include": "include", "show-headers": "include",
    "head": "head", "verbose": "verbose", "compressed": "compressed", "get": "as_query",
    "create-dirs": "create_dirs", "retry-connrefused": "retry_refused",
    "retry-all-errors": "retry_all",
}  # fmt: skip

_IGNORED_FLAGS = frozenset(
    [
        *("globoff", "no-buffer", "progress-bar", "disable", "http1.1", "http1.0", "http2"),
        *("http2-prior-knowledge", "http3", "ipv4", "ipv6", "tlsv1.2", "tlsv1.3", "tlsv1"),
        *("no-keepalive", "no-progress-meter", "path-as-is", "ssl-reqd", "tcp-nodelay", "raw"),
        *("styled-output", "no-styled-output", "no-sessionid", "basic", "anyauth"),
    ]
)

_VALUES: dict[str, Setter] = {
    "request": _store("method"),
    "header": _add("headers"),
    "data": _data("d"),
    "data-ascii": _data("d"),
    "data-raw": _data("raw"),
    "data-binary": _data("binary"),
    "data-urlencode": _data("urlencode"),
    "json": _json,
    "form": _form("form"),
    "form-string": _form("string"),
    "upload-file": _store("upload"),
    "url": _add("urls"),
    "output": _add("outputs"),
    "user": _store("user"),
    "user-agent": _store("agent"),
    "cookie": _add("cookies"),
    "referer": _store("referer"),
    "range": _store("byte_range"),
    "write-out": _store("write_out"),
    "dump-header": _store("dump_header"),
    "max-time": _store("max_time", float),
    "connect-timeout": _store("connect_timeout", float),
    "retry": _store("retry", int),
    "retry-delay": _store("retry_delay", float),
    "max-redirs": _store("max_redirects", int),
    "retry-max-time": _ignore,
    "max-filesize": _ignore,
    "limit-rate": _ignore,
    "keepalive-time": _ignore,
    "proto": _ignore,
    "proto-redir": _ignore,
    "proto-default": _ignore,
    "tls-max": _ignore,
}

# Each would bypass the policy, or needs a feature that the sandbox lacks.
_REFUSED = {
    "insecure": "certificates are always checked in this sandbox",
    "proxy": "requests leave only through the sandbox's own network",
    "proxy-user": "requests leave only through the sandbox's own network",
    "preproxy": "requests leave only through the sandbox's own network",
    "socks5": "requests leave only through the sandbox's own network",
    "socks5-hostname": "requests leave only through the sandbox's own network",
    "resolve": "names are looked up outside this sandbox",
    "connect-to": "names are looked up outside this sandbox",
    "dns-servers": "names are looked up outside this sandbox",
    "interface": "there are no network interfaces in this sandbox",
    "unix-socket": "there are no sockets in this sandbox",
    "cacert": "certificates are checked outside this sandbox",
    "capath": "certificates are checked outside this sandbox",
    "cert": "client certificates are not available in this sandbox",
    "key": "client certificates are not available in this sandbox",
    "config": "read the file and pass its options",
    "cookie-jar": "pass the cookies with -b",
    "location-trusted": "credentials are never sent on to another host",
    "continue-at": "download the whole file",
    "remote-header-name": "name the file with -o",
    "append": "only HTTP is available in this sandbox",
    "parallel": "pass one URL after another",
    "digest": "only basic authentication is available in this sandbox",
    "ntlm": "only basic authentication is available in this sandbox",
    "negotiate": "only basic authentication is available in this sandbox",
}


def parse_options(words: list[str]) -> CurlOptions:
    """Parse a command line, or raise `CurlUsageError`."""
    options = CurlOptions()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            options.urls += rest
            break
        if word.startswith("--"):
            _long(options, word, rest)
        elif word.startswith("-") and word != "-":
            _cluster(options, word[1:], rest)
        else:
            options.urls.append(word)
    return options


def _long(options: CurlOptions, word: str, rest: list[str]) -> None:
    name, joined, value = word[2:].partition("=")
    if joined and name in _VALUES:
        rest.insert(0, value)
    elif joined:
        name = word[2:]
    _apply(options, name, word, rest)


def _cluster(options: CurlOptions, letters: str, rest: list[str]) -> None:
    """Parse a cluster of short options, `-sSLo file` or `-XPOST`; the last may take a value."""
    while letters:
        letter, letters = letters[0], letters[1:]
        name = _SHORT.get(letter)
        if name is None:
            raise CurlUsageError(f"option -{letter}: is unknown")
        if name in _VALUES and letters:
            rest.insert(0, letters)
            letters = ""
        _apply(options, name, f"-{letter}", rest)


def _apply(options: CurlOptions, name: str, word: str, rest: list[str]) -> None:
    if name in _FLAGS:
        setattr(options, _FLAGS[name], True)
    elif name == "remote-name":
        options.outputs.append(None)
    elif name in _VALUES:
        _take_value(options, name, word, rest)
    elif name in _REFUSED:
        raise CurlUsageError(f"option {word}: is refused; {_REFUSED[name]}")
    elif name.startswith("no-") and name[3:] in _FLAGS:
        setattr(options, _FLAGS[name[3:]], False)
    elif name not in _IGNORED_FLAGS:
        raise CurlUsageError(f"option {word}: is unknown")


def _take_value(options: CurlOptions, name: str, word: str, rest: list[str]) -> None:
    if not rest:
        raise CurlUsageError(f"option {word}: requires parameter")
    try:
        _VALUES[name](options, rest.pop(0))
    except ValueError:
        raise CurlUsageError(f"option {word}: expected a proper numerical parameter") from None


async def make_request(call: CommandStream, options: CurlOptions, url: str) -> FetchRequest:
    """Return the request for one of the URLs."""
    body = await _make_body(call, options)
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


def _method(options: CurlOptions, body: _CurlBody | None) -> str:
    if options.head:
        return "HEAD"
    if options.upload is not None:
        return "PUT"
    return "GET" if body is None else "POST"


async def _headers(
    call: CommandStream, options: CurlOptions, body: _CurlBody | None
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
    optional = {
        "User-Agent": options.agent,
        "Referer": options.referer,
        "Cookie": "; ".join(options.cookies) or None,
        "Range": f"bytes={options.byte_range}" if options.byte_range else None,
        "Accept-Encoding": "gzip, deflate" if options.compressed else None,
    }
    chosen |= {name.lower(): (name, value) for name, value in optional.items() if value is not None}
    custom = await _custom_headers(call, options.headers)
    named = {name.lower() for name, _ in custom}
    kept = [pair for name, pair in chosen.items() if name not in named]
    return kept + [(name, value) for name, value in custom if value is not None]


async def _custom_headers(call: CommandStream, options: list[str]) -> list[tuple[str, str | None]]:
    """Apply `-H`: `Name: value` sets, `Name;` sets to empty, `Name:` removes a header."""
    lines: list[str] = []
    for text in options:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _CurlBody:
    """Body to send, and its default content type."""

    data: bytes
    content_type: str | None = None


async def read_input(call: CommandStream, name: str) -> bytes:
    """Read a file that the command line names, or all of stdin for `-`."""
    if name == "-":
        return await call.read()
    try:
        return call.read_file(name)
    except PathError:
        raise FetchFailed(26, f"Failed to open {name}") from None


async def _make_body(call: CommandStream, options: CurlOptions) -> _CurlBody | None:
    """Return the body, or None if there is none."""
    if options.forms:
        return await _multipart(call, options.forms)
    if options.upload is not None:
        return _CurlBody(data=await read_input(call, options.upload))
    if not options.data:
        return None
    separator = b"" if options.json else b"&"
    data = separator.join([await _piece(call, kind, text) for kind, text in options.data])
    kind = "application/json" if options.json else "application/x-www-form-urlencoded"
    return _CurlBody(data=data, content_type=kind)


async def _piece(call: CommandStream, kind: str, text: str) -> bytes:
    if kind == "urlencode":
        return await _urlencoded(call, text)
    if kind == "raw" or not text.startswith("@"):
        return text.encode()
    data = await read_input(call, text[1:])
    if kind == "d":
        return data.translate(None, b"\r\n\0")
    return data


async def _urlencoded(call: CommandStream, text: str) -> bytes:
    """Encode a `--data-urlencode` value: text, =text, name=text, @file, or name@file."""
    mark = next((c for c in text if c in "=@"), "")
    name, _, content = text.partition(mark) if mark else ("", "", text)
    data = await read_input(call, content) if mark == "@" else content.encode()
    encoded = quote(data, safe="").encode()
    return name.encode() + b"=" + encoded if name else encoded


async def _multipart(call: CommandStream, forms: list[tuple[str, str]]) -> _CurlBody:
    boundary = f"------------------------{secrets.token_hex(11)}"
    lines: list[bytes] = []
    for kind, form in forms:
        name, mark, value = form.partition("=")
        if not mark:
            raise FetchFailed(2, f"Illegally formatted input field: {form}")
        lines += [f"--{boundary}".encode(), *await _part(call, name, value, kind == "form")]
    lines += [f"--{boundary}--".encode(), b""]
    return _CurlBody(
        data=b"\r\n".join(lines), content_type=f"multipart/form-data; boundary={boundary}"
    )


async def _part(call: CommandStream, name: str, value: str, special: bool) -> list[bytes]:
    disposition = f'Content-Disposition: form-data; name="{_quoted(name)}"'
    if not special:
        return [disposition.encode(), b"", value.encode()]
    value, *rest = value.split(";") if value[:1] in "@<" else [value]
    attributes = dict(item.strip().partition("=")[::2] for item in rest)
    kind = attributes.get("type")
    if value.startswith("@"):
        filename = attributes.get("filename", posixpath.basename(value[1:])).strip('"')
        disposition += f'; filename="{_quoted(filename)}"'
        kind = kind or mimetypes.guess_type(filename)[0] or "application/octet-stream"
    data = await read_input(call, value[1:]) if value[:1] in ("@", "<") else value.encode()
    head = [disposition.encode()] + ([f"Content-Type: {kind}".encode()] if kind else [])
    return [*head, b"", data]


def _quoted(text: str) -> str:
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
