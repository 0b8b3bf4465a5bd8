"""Heads of HTTP/1.1 messages: parsed strictly, and written in one form only.

A message that two parsers could read in two ways is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_HEAD = 64 * 1024
MAX_FIELDS = 200

Fields: TypeAlias = list[tuple[str, str]]
"""Names and values of headers in their order, decoded as Latin-1."""

Framing: TypeAlias = int | Literal["chunked", "close"]
"""End of a body: after that many bytes, with the last chunk, or with the connection."""

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_VISIBLE = r"[\x21-\x7e\x80-\xff]"
_TEXT = r"[\t\x20-\x7e\x80-\xff]"
_FIELDS = rf"((?:{_TOKEN}++:{_TEXT}*+\r\n)*+)\r\n"
_REQUEST = re.compile(rf"({_TOKEN}++) ({_VISIBLE}++) HTTP/1\.([01])\r\n{_FIELDS}")
# Some servers send an empty line first.
_RESPONSE = re.compile(rf"(?:\r\n)?HTTP/1\.([01]) ([1-9][0-9]{{2}})(?: ({_TEXT}*+))?\r\n{_FIELDS}")
_NAME = re.compile(rf"{_TOKEN}+")
_VALUE = re.compile(rf"{_TEXT}*")
_TARGET = re.compile(rf"{_VISIBLE}+")
_LENGTH = re.compile(r"[0-9]{1,18}")
# Of text that matched _FIELDS: names, and values without the blanks before them.
_FIELD = re.compile(r"([^:]++):[ \t]*+([^\r]*+)\r\n")

HOP_BY_HOP = frozenset(
    (
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""Headers that belong to one connection, or name the server; each side of a proxy has its own."""

# A Connection header that names these would remove a part of the message itself.
_END_TO_END = frozenset(("content-type", "cookie"))
_USUAL_OPTIONS = frozenset(("close", "keep-alive", "upgrade"))
_BLANKS = (" ", "\t")
_NO_OPTIONS: frozenset[str] = frozenset()
_KEEP_ALIVE = frozenset(("keep-alive",))


class MalformedMessage(Exception):
    """A message that cannot be passed on, and the status to refuse it with."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


@dataclass(slots=True)
class RequestHead:
    """The head of a request.

    `fields` has only end-to-end headers, without the Host. `upgrade` is the protocol that the
    client offers to change to, in lower case. `own` holds the values of the hop-by-hop headers.
    """

    method: str
    target: str
    host: str
    fields: Fields
    framing: Framing
    keep_alive: bool
    http11: bool
    upgrade: str
    expects_continue: bool
    own: dict[str, list[str]]

    def get(self, name: str) -> str:
        """Return the last end-to-end header of that name (in lower case), or nothing."""
        return next((value for key, value in reversed(self.fields) if key.lower() == name), "")


@dataclass(slots=True)
class ResponseHead:
    """The head of a response; `fields` has only end-to-end headers.

    `ambiguous` is True if it has both Content-Length and Transfer-Encoding. `framing` trusts the
    chunks then; a proxy in front of an untrusted server refuses the response instead.
    """

    status: int
    reason: str
    fields: Fields
    framing: Framing
    keep_alive: bool
    ambiguous: bool = False


@dataclass(slots=True)
class ResponseFraming:
    """The headers that frame a response to a client, and whether another request can follow."""

    fields: Fields
    chunked: bool
    keep_alive: bool


def response_framing(
    method: str, status: int, length: int | None, *, keep_alive: bool, http11: bool
) -> ResponseFraming:
    """Choose how a response ends for a client.

    Args:
        method: Method of the request.
        length: Size of the body, or None if it is not known in advance.
        keep_alive: Whether the client can send another request over the connection.
        http11: Whether the client speaks HTTP/1.1, and so understands chunks.
    """
    fields: Fields = []
    chunked = False
    if not has_no_body(method, status):
        if length is not None:
            fields.append(("content-length", str(length)))
        elif http11:
            chunked = True
            fields.append(("transfer-encoding", "chunked"))
        else:
            keep_alive = False
    if not keep_alive:
        fields.append(("connection", "close"))
    elif not http11:
        fields.append(("connection", "keep-alive"))
    return ResponseFraming(fields, chunked, keep_alive)


def find_head_end(buffer: bytes, start: int = 0, scanned: int = 0) -> int:
    """Return the index after the head that begins at `start`; 0 while it is incomplete.

    Args:
        scanned: How many bytes an earlier call has seen. They are not read again, as a peer may
            send a head byte by byte.

    Raises:
        MalformedMessage: The head is too long, or a line ends without a carriage return.
    """
    if len(buffer) == start:
        return 0
    unseen = start + scanned
    end = buffer.find(b"\r\n\r\n", max(start, unseen - 3))
    size = (end if end >= 0 else len(buffer)) - start
    if size > MAX_HEAD:
        raise MalformedMessage(f"the head is longer than {MAX_HEAD} bytes", 431)
    if end >= 0:
        return end + 4
    if buffer.count(b"\n", unseen) != buffer.count(b"\r\n", max(start, unseen - 1)):
        raise MalformedMessage("a line ends without a carriage return")
    return 0


def parse_request(raw: bytes) -> RequestHead:
    """Parse a request from all bytes of its head. Raises `MalformedMessage`."""
    match = _REQUEST.fullmatch(raw.decode("latin-1"))
    if match is None:
        raise MalformedMessage("the head of the request is not HTTP/1.1 as RFC 9112 defines it")
    method, target, minor, text = match.groups()
    http11 = minor == "1"
    fields, own = _split_fields(text)
    hosts = own.get("host", ())
    if len(hosts) != 1:
        raise MalformedMessage("the request has no Host, or more than one")
    framing = _framing(own, http11=http11)
    options = _options(own)
    return RequestHead(
        method,
        target,
        hosts[0],
        _end_to_end(fields, options),
        0 if framing is None else framing,
        "close" not in options and (http11 or "keep-alive" in options),
        http11,
        ",".join(own.get("upgrade", ())).lower() if http11 and "upgrade" in options else "",
        _expects_continue(own, http11=http11),
        own,
    )


def parse_response(raw: bytes, method: str) -> ResponseHead:
    """Parse a response to a request of that method. Raises `MalformedMessage`."""
    match = _RESPONSE.fullmatch(raw.decode("latin-1"))
    if match is None:
        raise MalformedMessage("the response is not HTTP/1.1", 502)
    minor, digits, reason, text = match.groups()
    status = int(digits)
    fields, own = _split_fields(text)
    try:
        framing = _framing(own, http11=True, response=True)
    except MalformedMessage as error:
        raise MalformedMessage(f"in the response, {error.reason}", 502) from None
    options = _options(own)
    keep_alive = "close" not in options and (minor == "1" or "keep-alive" in options)
    fields = _end_to_end(fields, options)
    ambiguous = framing == "chunked" and "content-length" in own
    if has_no_body(method, status):
        if isinstance(framing, int) and status >= 200 and status != 204:
            fields.append(("content-length", own["content-length"][0]))
        framing = 0
    elif framing is None or framing == "close":
        framing, keep_alive = "close", False
    elif ambiguous:
        # RFC 9112, 6.3: trust the chunks, and do not use the connection again.
        keep_alive = False
    return ResponseHead(status, reason or "", fields, framing, keep_alive, ambiguous)


def has_no_body(method: str, status: int) -> bool:
    """Tell whether a response ends with its head, whatever the head says."""
    return method == "HEAD" or status in (204, 304) or status < 200


def find_invalid_field(fields: Iterable[tuple[str, str]]) -> str:
    """Describe the first header that cannot be sent, without its value; empty if all can."""
    for name, value in fields:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"{name!r:.80} is not the name of a header"
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            return f"the value of the header {name} cannot be sent"
    return ""


def is_token(text: str) -> bool:
    """Tell whether a text can be a method."""
    return _NAME.fullmatch(text) is not None


def is_target(text: str) -> bool:
    """Tell whether a text can be the target of a request."""
    return _TARGET.fullmatch(text) is not None


def write_request(method: str, target: str, fields: Fields) -> bytes:
    """Return the bytes of a request's head."""
    return _write(f"{method} {target} HTTP/1.1\r\n", fields)


def write_response(status: int, reason: str, fields: Fields) -> bytes:
    """Return the bytes of a response's head."""
    return _write(f"HTTP/1.1 {status} {reason}\r\n", fields)


def write_fields(fields: Fields) -> bytes:
    """Return the bytes of a head without its first line."""
    return _write("", fields)


def _write(line: str, fields: Fields) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in fields]
    return f"{line}{''.join(lines)}\r\n".encode("latin-1")


def _split_fields(text: str) -> tuple[Fields, dict[str, list[str]]]:
    """Separate headers for the other end from those of this connection, by lower-case name."""
    found = _FIELD.findall(text)
    if len(found) > MAX_FIELDS:
        raise MalformedMessage(f"the head has more than {MAX_FIELDS} headers", 431)
    fields: Fields = []
    own: dict[str, list[str]] = {}
    for field in found:
        if field[1][-1:] in _BLANKS:
            field = field[0], field[1].rstrip(" \t")
        name = field[0].lower()
        if name in HOP_BY_HOP:
            own.setdefault(name, []).append(field[1])
        else:
            fields.append(field)
    return fields, own


def _options(own: dict[str, list[str]]) -> frozenset[str]:
    """Return the options in the Connection header."""
    values = own.get("connection")
    if values is None:
        return _NO_OPTIONS
    if values == ["keep-alive"]:
        return _KEEP_ALIVE
    return frozenset(option.strip().lower() for option in ",".join(values).split(","))


def _end_to_end(fields: Fields, options: frozenset[str]) -> Fields:
    """Remove the headers that the Connection header names."""
    if options <= _USUAL_OPTIONS:
        return fields
    named = options - _USUAL_OPTIONS - _END_TO_END
    return [field for field in fields if field[0].lower() not in named] if named else fields


def _framing(own: dict[str, list[str]], *, http11: bool, response: bool = False) -> Framing | None:
    """Return where the body ends; None if the head does not say."""
    codings, lengths = own.get("transfer-encoding"), own.get("content-length")
    if codings is not None:
        if response and lengths is None and [one.lower() for one in codings] == ["identity"]:
            return "close"
        if len(codings) > 1 or codings[0].lower() != "chunked" or not http11:
            raise MalformedMessage("the only Transfer-Encoding is chunked, once, in HTTP/1.1")
        if lengths is not None and not response:
            raise MalformedMessage("there are both Content-Length and Transfer-Encoding")
        return "chunked"
    if lengths is None:
        return None
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise MalformedMessage("Content-Length is not one number")
    return int(lengths[0])


def _expects_continue(own: dict[str, list[str]], *, http11: bool) -> bool:
    values = own.get("expect")
    if values is None or not http11:
        return False
    if ",".join(values).lower() != "100-continue":
        raise MalformedMessage("the only expectation is 100-continue", 417)
    return True
