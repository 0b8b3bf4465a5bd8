"""Parser of curl's command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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
    "proxy": "the sandbox's own network is the only way out",
    "proxy-user": "the sandbox's own network is the only way out",
    "preproxy": "the sandbox's own network is the only way out",
    "socks5": "the sandbox's own network is the only way out",
    "socks5-hostname": "the sandbox's own network is the only way out",
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
