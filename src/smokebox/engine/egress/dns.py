"""Answers to what a sandbox asks by DNS: a made-up address for a name that it may reach.

Nothing that is asked goes anywhere else, so that no message can leave in a question.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


NO_ERROR, FORMAT_ERROR, NO_SUCH_NAME, NOT_IMPLEMENTED = 0, 1, 3, 4
ADDRESS, ADDRESS_V6, ANY = 1, 28, 255

_HEADER = struct.Struct("!HHHHHH")
_ANSWER, _RECURSION_DESIRED, _RECURSION_AVAILABLE, _OPCODE = 0x8000, 0x0100, 0x0080, 0x7800
_INTERNET = 1
_POINTER_TO_QUESTION = b"\xc0\x0c"
_SECONDS = 60
_LONGEST_NAME, _LONGEST_LABEL = 255, 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked: a name in lower case, and the type of record."""

    name: str
    kind: int
    end: int


def answer(message: bytes, find: Callable[[Question], str | None]) -> bytes | None:
    """The answer to a message; None for what is no question.

    `find` gives an address for a name that is there, and None for others.
    """
    if len(message) < _HEADER.size:
        return None
    number, flags, questions, *_ = _HEADER.unpack_from(message)
    if flags & _ANSWER:
        return None
    kept = flags & (_OPCODE | _RECURSION_DESIRED)
    question = read_question(message) if questions == 1 else None
    if flags & _OPCODE or question is None:
        code = NOT_IMPLEMENTED if flags & _OPCODE else FORMAT_ERROR
        return _HEADER.pack(number, _ANSWER | _RECURSION_AVAILABLE | kept | code, 0, 0, 0, 0)
    address = find(question)
    code = NO_SUCH_NAME if address is None else NO_ERROR
    record = b""
    if address is not None and question.kind in (ADDRESS, ANY):
        record = _POINTER_TO_QUESTION
        record += struct.pack("!HHIH", ADDRESS, _INTERNET, _SECONDS, 4) + socket.inet_aton(address)
    # No address of version 6 stands for a name: programs take the other at once.
    head = _HEADER.pack(
        number, _ANSWER | _RECURSION_AVAILABLE | kept | code, 1, 1 if record else 0, 0, 0
    )
    return head + message[_HEADER.size : question.end] + record


def read_question(message: bytes) -> Question | None:
    """The question of a message, or None for what is none."""
    place, labels = _HEADER.size, []
    while place < len(message) and (length := message[place]):
        label = message[place + 1 : place + 1 + length]
        if length > _LONGEST_LABEL or len(label) != length:
            return None
        labels.append(label)
        place += 1 + length
    place += 1
    if not labels or place - _HEADER.size > _LONGEST_NAME or len(message) < place + 4:
        return None
    kind, network = struct.unpack_from("!HH", message, place)
    if network not in (_INTERNET, ANY):
        return None
    try:
        name = b".".join(labels).decode("ascii").lower()
    except UnicodeDecodeError:
        return None
    # A dot or a control character inside of a label would make another name of it.
    if any(b"." in label for label in labels) or not name.isprintable() or " " in name:
        return None
    return Question(name=name, kind=kind, end=place + 4)


# For tests of network devices (RFC 2544): no program wants these for themselves.
NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
MOST_NAMES = 16384

_FIRST, _LAST = int(NETWORK[1]), int(NETWORK[-2])


class HostAddresses:
    """The latest names that were asked for. An address is given to another name only after
    all others were, so that what a program still remembers seldom leads elsewhere.

    The table is kept in a file too: programs remember addresses when the engine does not.
    """

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._names: dict[str, str] = {}
        self._next = _FIRST
        self._path = ""
        self._written = 0

    def address_of(self, name: str) -> str:
        """The address that stands for a name."""
        found = self._addresses.get(name)
        if found is not None:
            self._addresses.move_to_end(name)
            return found
        while (address := str(ipaddress.IPv4Address(self._next))) in self._names:
            self._advance()
        self._advance()
        self._put(name, address)
        self._append(f"{address} {name}\n")
        return address

    def name_of(self, address: str) -> str | None:
        """The name that an address stands for."""
        return self._names.get(address)

    def begin(self, path: str) -> None:
        """Know of none, and keep those that come in a file."""
        self._addresses.clear()
        self._names.clear()
        self._next, self._path, self._written = _FIRST, path, 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def resume(self, path: str) -> None:
        """Know again what an engine before this one has told."""
        self._path = path
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                address, _, name = line.strip().partition(" ")
                with contextlib.suppress(ValueError):
                    if name and ipaddress.IPv4Address(address) in NETWORK:
                        self._put(name, address)
                        self._next = int(ipaddress.IPv4Address(address))
                        self._advance()
        self._written = len(self._addresses)

    def _put(self, name: str, address: str) -> None:
        self._addresses[name] = address
        self._names[address] = name
        if len(self._addresses) > self._most:
            _, old = self._addresses.popitem(last=False)
            del self._names[old]

    def _advance(self) -> None:
        self._next = _FIRST if self._next >= _LAST else self._next + 1

    def _append(self, line: str) -> None:
        if not self._path:
            return
        self._written += 1
        lines, flags = line, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._written > 2 * self._most:
            lines = "".join(f"{address} {name}\n" for name, address in self._addresses.items())
            flags, self._written = flags | os.O_TRUNC, len(self._addresses)
        # On a full disk a name is forgotten with the engine, and no sooner.
        with contextlib.suppress(OSError):
            fd = os.open(self._path, flags, 0o600)
            try:
                os.write(fd, lines.encode())
            finally:
                os.close(fd)
