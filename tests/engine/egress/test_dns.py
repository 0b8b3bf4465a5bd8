"""DnsListener by DNS, as bytes, and what is answered."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from smokebox.engine.egress import dns

KNOWN = {"a.example": "198.18.0.1"}


def ask(name: str, kind: int = dns.TYPE_A, *, flags: int = 0x0100, count: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
    head = struct.pack("!HHHHHH", 0x1234, flags, count, 0, 0, 0)
    return head + labels + struct.pack("!HH", kind, 1)


def answer(message: bytes) -> bytes:
    found = dns.answer_query(message, lambda question: KNOWN.get(question.name))
    assert found is not None
    return found


def code(message: bytes) -> int:
    return message[3] & 0xF


def test_a_name_that_may_be_known_has_an_address() -> None:
    found = answer(ask("A.Example"))
    number, flags, questions, answers, *_ = struct.unpack_from("!HHHHHH", found)
    assert (number, flags, questions, answers) == (0x1234, 0x8180, 1, 1)
    assert found.endswith(socket.inet_aton("198.18.0.1"))


@pytest.mark.parametrize("kind", [dns.TYPE_AAAA, 16, 65])
def test_it_has_nothing_else(kind: int) -> None:
    found = answer(ask("a.example", kind))
    assert (code(found), found[6:8]) == (dns.NO_ERROR, b"\0\0")


def test_any_other_name_does_not_exist() -> None:
    assert code(answer(ask("b.example"))) == dns.NAME_ERROR


def test_what_is_no_question_gets_no_answer() -> None:
    assert dns.answer_query(b"", lambda _: None) is None
    assert dns.answer_query(b"x" * 11, lambda _: None) is None
    assert dns.answer_query(ask("a.example", flags=0x8180), lambda _: None) is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (ask("a.example", count=2), dns.FORMAT_ERROR),
        (ask("a.example")[:-1], dns.FORMAT_ERROR),
        (ask("a.example", flags=0x2900), dns.NOT_IMPLEMENTED),
        (ask("a.example")[:12] + b"\xc0\x0c\0\1\0\1", dns.FORMAT_ERROR),
        (ask("a.example")[:12] + b"\0\0\1\0\1", dns.FORMAT_ERROR),
        (ask("a.example")[:12] + b"\3a.b\0\0\1\0\1", dns.FORMAT_ERROR),
        (ask("a.example")[:12] + b"\3a\nb\0\0\1\0\1", dns.FORMAT_ERROR),
        (ask("a.example")[:12] + b"\3\xff\xfeb\0\0\1\0\1", dns.FORMAT_ERROR),
        (ask(".".join(["x" * 63] * 4)), dns.FORMAT_ERROR),
    ],
)
def test_what_cannot_be_read_is_said_to_be_so(message: bytes, expected: int) -> None:
    assert code(answer(message)) == expected


def test_no_bytes_break_it() -> None:
    chance = random.Random(5)
    valid = ask("a.example")
    for _ in range(5000):
        size = chance.randrange(0, 64)
        cut = valid[: chance.randrange(len(valid))]
        dns.answer_query(cut + chance.randbytes(size), lambda question: KNOWN.get(question.name))
