"""DNS inside a sandbox: names that its policy allows resolve to synthetic addresses.

No query leaves the host, so that no data can leave in one.
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


NO_ERROR, FORMAT_ERROR, NAME_ERROR, NOT_IMPLEMENTED = 0, 1, 3, 4
TYPE_A, TYPE_AAAA, ANY = 1, 28, 255

_HEADER = struct.Struct("!HHHHHH")
_RESPONSE, _RECURSION_DESIRED, _RECURSION_AVAILABLE, _OPCODE = 0x8000, 0x0100, 0x0080, 0x7800
_CLASS_IN = 1
_POINTER_TO_QUESTION = b"\xc0\x0c"
_TTL = 60
_MAX_NAME, _MAX_LABEL = 255, 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of a DNS query: a name in lower case, and the type of record."""

    name: str
    type: int
    end: int


def answer_query(message: bytes, lookup: Callable[[Question], str | None]) -> bytes | None:
    """Return the response to a DNS message, or None if it is not a query.

    `lookup` returns the address of a name, or None if the name does not exist.
    """
    if len(message) < _HEADER.size:
        return None
    number, flags, questions, *_ = _HEADER.unpack_from(message)
    if flags & _RESPONSE:
        return None
    kept = flags & (_OPCODE | _RECURSION_DESIRED)
    question = parse_question(message) if questions == 1 else None
    if flags & _OPCODE or question is None:
        code = NOT_IMPLEMENTED if flags & _OPCODE else FORMAT_ERROR
        return _HEADER.pack(number, _RESPONSE | _RECURSION_AVAILABLE | kept | code, 0, 0, 0, 0)
    address = lookup(question)
    code = NAME_ERROR if address is None else NO_ERROR
    record = b""
    if address is not None and question.type in (TYPE_A, ANY):
        record = _POINTER_TO_QUESTION
        record += struct.pack("!HHIH", TYPE_A, _CLASS_IN, _TTL, 4) + socket.inet_aton(address)
    # There are no AAAA records: programs use the IPv4 address at once.
    head = _HEADER.pack(
        number, _RESPONSE | _RECURSION_AVAILABLE | kept | code, 1, 1 if record else 0, 0, 0
    )
    return head + message[_HEADER.size : question.end] + record


def parse_question(message: bytes) -> Question | None:
    """Parse the question of a query; None if it is not valid."""
    position, labels = _HEADER.size, []
    while position < len(message) and (length := message[position]):
        label = message[position + 1 : position + 1 + length]
        if length > _MAX_LABEL or len(label) != length:
            return None
        labels.append(label)
        position += 1 + length
    position += 1
    if not labels or position - _HEADER.size > _MAX_NAME or len(message) < position + 4:
        return None
    kind, network = struct.unpack_from("!HH", message, position)
    if network not in (_CLASS_IN, ANY):
        return None
    try:
        name = b".".join(labels).decode("ascii").lower()
    except UnicodeDecodeError:
        return None
    # With a dot or a control character inside a label it would be another name.
    if any(b"." in label for label in labels) or not name.isprintable() or " " in name:
        return None
    return Question(name=name, type=kind, end=position + 4)


# Reserved for benchmarks of network devices (RFC 2544), so programs have no other use for it.
NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
MAX_NAMES = 16384

_FIRST, _LAST = int(NETWORK[1]), int(NETWORK[-2])


class HostAddresses:
    """Synthetic addresses of the names that a sandbox resolved last.

    An address is reused for another name only after all others were, so that an address which a
    program has cached seldom leads elsewhere. The table is stored in a file, because programs
    keep addresses beyond a restart of the engine.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._addresses: OrderedDict[str, str] = OrderedDict()
        self._names: dict[str, str] = {}
        self._next = _FIRST
        self._path = ""
        self._written = 0

    def address_of(self, name: str) -> str:
        """Return the address of a name, assigning one if it has none."""
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
        """Return the name of an address, if it has one."""
        return self._names.get(address)

    def create(self, path: str) -> None:
        """Start with an empty table, stored at `path`."""
        self._addresses.clear()
        self._names.clear()
        self._next, self._path, self._written = _FIRST, path, 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def load(self, path: str) -> None:
        """Load the table that an earlier engine stored at `path`."""
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
        if len(self._addresses) > self._max_names:
            _, oldest = self._addresses.popitem(last=False)
            del self._names[oldest]

    def _advance(self) -> None:
        self._next = _FIRST if self._next >= _LAST else self._next + 1

    def _append(self, line: str) -> None:
        if not self._path:
            return
        self._written += 1
        lines, flags = line, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._written > 2 * self._max_names:
            lines = "".join(f"{address} {name}\n" for name, address in self._addresses.items())
            flags, self._written = flags | os.O_TRUNC, len(self._addresses)
        # On a full disk the name is lost at the next restart of the engine.
        with contextlib.suppress(OSError):
            fd = os.open(self._path, flags, 0o600)
            try:
                os.write(fd, lines.encode())
            finally:
                os.close(fd)
