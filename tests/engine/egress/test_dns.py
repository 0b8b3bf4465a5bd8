"""DNS messages, as bytes, and the responses to them."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from smokebox.engine.egress import dns

ADDRESSES = {"a.example": "198.18.0.1"}


def query(name: str, kind: int = dns.TYPE_A, *, flags: int = 0x0100, count: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
    head = struct.pack("!HHHHHH", 0x1234, flags, count, 0, 0, 0)
    return head + labels + struct.pack("!HH", kind, 1)


def respond(message: bytes) -> bytes:
    response = dns.answer_query(message, lambda question: ADDRESSES.get(question.name))
    assert response is not None
    return response


def response_code(message: bytes) -> int:
    return message[3] & 0xF


def test_allowed_name_resolves_to_an_address() -> None:
    response = respond(query("A.Example"))
    number, flags, questions, answers, *_ = struct.unpack_from("!HHHHHH", response)
    assert (number, flags, questions, answers) == (0x1234, 0x8180, 1, 1)
    assert response.endswith(socket.inet_aton("198.18.0.1"))


@pytest.mark.parametrize("kind", [dns.TYPE_AAAA, 16, 65])
def test_allowed_name_has_no_records_of_other_types(kind: int) -> None:
    response = respond(query("a.example", kind))
    assert (response_code(response), response[6:8]) == (dns.NO_ERROR, b"\0\0")


def test_other_names_do_not_exist() -> None:
    assert response_code(respond(query("b.example"))) == dns.NAME_ERROR


def test_messages_that_are_not_queries_get_no_response() -> None:
    assert dns.answer_query(b"", lambda _: None) is None
    assert dns.answer_query(b"x" * 11, lambda _: None) is None
    assert dns.answer_query(query("a.example", flags=0x8180), lambda _: None) is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (query("a.example", count=2), dns.FORMAT_ERROR),
        (query("a.example")[:-1], dns.FORMAT_ERROR),
        (query("a.example", flags=0x2900), dns.NOT_IMPLEMENTED),
        (query("a.example")[:12] + b"\xc0\x0c\0\1\0\1", dns.FORMAT_ERROR),
        (query("a.example")[:12] + b"\0\0\1\0\1", dns.FORMAT_ERROR),
        (query("a.example")[:12] + b"\3a.b\0\0\1\0\1", dns.FORMAT_ERROR),
        (query("a.example")[:12] + b"\3a\nb\0\0\1\0\1", dns.FORMAT_ERROR),
        (query("a.example")[:12] + b"\3\xff\xfeb\0\0\1\0\1", dns.FORMAT_ERROR),
        (query(".".join(["x" * 63] * 4)), dns.FORMAT_ERROR),
    ],
)
def test_malformed_query_gets_an_error_code(message: bytes, expected: int) -> None:
    assert response_code(respond(message)) == expected


def test_random_bytes_raise_nothing() -> None:
    rng = random.Random(5)
    valid = query("a.example")
    for _ in range(5000):
        size = rng.randrange(0, 64)
        prefix = valid[: rng.randrange(len(valid))]
        dns.answer_query(
            prefix + rng.randbytes(size), lambda question: ADDRESSES.get(question.name)
        )
