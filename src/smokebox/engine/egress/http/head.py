"""The heads of HTTP/1 messages, read strictly and written anew.

What two readers could take for two things is refused: a message leaves here in one form only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_HEAD = 64 * 1024
MOST_FIELDS = 200

Fields: TypeAlias = list[tuple[str, str]]
"""Names and values in the order that they came in, as Latin-1."""

Framing: TypeAlias = int | Literal["chunked", "close"]
"""How long a body is: that many bytes, chunks, or until the connection is closed."""

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
# What a target and a value may hold: nothing that ends a line, and no other control character.
_VISIBLE = r"[\x21-\x7e\x80-\xff]"
_FIELD = rf"{_TOKEN}++:[\t\x20-\x7e\x80-\xff]*+\r\n"
_REQUEST = re.compile(rf"({_TOKEN}++) ({_VISIBLE}++) HTTP/1\.([01])\r\n((?:{_FIELD})*+)\r\n")
_STATUS = re.compile(
    rf"HTTP/1\.([01]) ([1-9][0-9]{{2}})(?: ([\t\x20-\x7e\x80-\xff]*+))?\r\n((?:{_FIELD})*+)\r\n"
)
_NAME = re.compile(rf"{_TOKEN}+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rf"{_VISIBLE}+")
_LENGTH = re.compile(r"[0-9]{1,18}")

# They belong to one connection, or say where it goes; each side of the door has its own.
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


class Malformed(Exception):
    """A message that cannot be passed on, and the status that says so."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


@dataclass(slots=True)
class RequestHead:
    """What a program asks for. `fields` are those that concern the server, without the Host."""

    method: str
    target: str
    host: str
    fields: Fields
    framing: Framing
    keep: bool
    modern: bool = True
    upgrade: bool = False
    expects: bool = False


@dataclass(slots=True)
class ResponseHead:
    """What a server begins its answer with. `fields` are those that concern the program."""

    status: int
    reason: str
    fields: Fields
    framing: Framing
    keep: bool
    upgrade: str = ""


def parse_request(raw: bytes) -> RequestHead:
    """A request from all bytes of its head. Raises `Malformed`."""
    found = _REQUEST.fullmatch(raw.decode("latin-1"))
    if found is None:
        raise Malformed("the head of the request is not HTTP/1.1 as RFC 9112 has it")
    method, target, minor, text = found.groups()
    modern = minor == "1"
    fields = _fields(text)
    own = _Own(fields)
    if len(own.host) != 1:
        raise Malformed("the request has no Host, or more than one")
    framing = own.framing(modern=modern)
    options = own.options
    # Whatever else could be upgraded to is asked for without the upgrade, and answered so.
    upgrade = modern and "upgrade" in options and own.upgrade.strip().lower() == "websocket"
    keep = "close" not in options and (modern or "keep-alive" in options)
    return RequestHead(
        method,
        target,
        own.host[0],
        [field for field in fields if own.passes(field[0])],
        0 if framing is None else framing,
        keep,
        modern,
        upgrade,
        _expects(own, modern=modern),
    )


def parse_response(raw: bytes, method: str) -> ResponseHead:
    """An answer to a request of that method. Raises `Malformed`."""
    found = _STATUS.fullmatch(raw.decode("latin-1"))
    if found is None:
        raise Malformed("the server's answer is not HTTP/1.1", 502)
    minor, status, reason, text = found.groups()
    modern, code = minor == "1", int(status)
    fields = _fields(text)
    own = _Own(fields)
    try:
        framing = own.framing(modern=True, answer=True)
    except Malformed as error:
        raise Malformed(f"of the server's answer, {error.reason}", 502) from None
    options = own.options
    keep = "close" not in options and (modern or "keep-alive" in options)
    if own.coding and own.length:
        # RFC 9112, 6.3: the chunks are believed, and the connection is not used again.
        keep = False
    kept = [field for field in fields if own.passes(field[0])]
    if bodiless(method, code):
        if own.length and framing != "chunked":
            kept.append(("content-length", own.length[0]))
        framing = 0
    elif framing is None:
        framing, keep = "close", False
    return ResponseHead(code, reason or "", kept, framing, keep, own.upgrade.strip())


def bodiless(method: str, status: int) -> bool:
    """Whether an answer ends with its head, whatever that says."""
    return method == "HEAD" or status in (204, 304) or status < 200


def wrong_field(fields: Iterable[tuple[str, str]]) -> str:
    """What is wrong with a handler's headers, if anything. No value is shown."""
    for name, value in fields:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"{name!r:.80} is not the name of a header"
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            return f"the value of the header {name} cannot be sent"
    return ""


def is_token(text: str) -> bool:
    """Whether that can be a method."""
    return _NAME.fullmatch(text) is not None


def is_target(text: str) -> bool:
    """Whether that can be asked for: one word of what can be seen."""
    return _TARGET.fullmatch(text) is not None


def write_request(method: str, target: str, fields: Fields) -> bytes:
    """The bytes of a request's head."""
    lines = [f"{method} {target} HTTP/1.1\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in fields]
    lines.append("\r\n")
    return "".join(lines).encode("latin-1")


def write_response(status: int, reason: str, fields: Fields) -> bytes:
    """The bytes of an answer's head."""
    lines = [f"HTTP/1.1 {status} {reason}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in fields]
    lines.append("\r\n")
    return "".join(lines).encode("latin-1")


def _fields(text: str) -> Fields:
    lines = text.split("\r\n")
    lines.pop()
    if len(lines) > MOST_FIELDS:
        raise Malformed(f"the head has more than {MOST_FIELDS} headers", 431)
    fields = []
    for line in lines:
        name, _, value = line.partition(":")
        fields.append((name, value.strip(" \t")))
    return fields


class _Own:
    """What a head says about its own connection."""

    __slots__ = ("coding", "connection", "expect", "host", "length", "named", "upgrade")

    def __init__(self, fields: Fields) -> None:
        self.host: list[str] = []
        self.length: list[str] = []
        self.coding: list[str] = []
        self.connection = self.upgrade = self.expect = ""
        for name, value in fields:
            match name.lower():
                case "host":
                    self.host.append(value)
                case "content-length":
                    self.length.append(value)
                case "transfer-encoding":
                    self.coding.append(value)
                case "connection":
                    self.connection += "," + value
                case "upgrade":
                    self.upgrade += "," + value if self.upgrade else value
                case "expect":
                    self.expect += "," + value if self.expect else value
        self.named = HOP_BY_HOP
        if self.connection:
            self.named = HOP_BY_HOP | self.options

    @property
    def options(self) -> set[str]:
        return {option.strip().lower() for option in self.connection.split(",")}

    def passes(self, name: str) -> bool:
        return name.lower() not in self.named

    def framing(self, *, modern: bool, answer: bool = False) -> Framing | None:
        """How the body ends; None where the head does not say."""
        if self.coding:
            if len(self.coding) > 1 or self.coding[0].lower() != "chunked" or not modern:
                raise Malformed("the only Transfer-Encoding is chunked, once, in HTTP/1.1")
            if self.length and not answer:
                raise Malformed("there are both Content-Length and Transfer-Encoding")
            return "chunked"
        if not self.length:
            return None
        if len(self.length) > 1 or not _LENGTH.fullmatch(self.length[0]):
            raise Malformed("Content-Length is not one number")
        return int(self.length[0])


def _expects(own: _Own, *, modern: bool) -> bool:
    if not own.expect or not modern:
        return False
    if own.expect.lower() != "100-continue":
        raise Malformed("the only expectation is 100-continue", 417)
    return True
