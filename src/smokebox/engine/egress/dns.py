"""Answers to what a sandbox asks by DNS: a made-up address for a name that it may reach.

Nothing that is asked goes anywhere else, so that no message can leave in a question.
"""

from __future__ import annotations

import socket
import struct
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
