"""TLS and its server name (SNI), recognized in the first bytes of a connection."""

from __future__ import annotations

import random
import ssl
import struct

import pytest

from smokebox.engine.egress.client_hello import MAX_HELLO, ClientHello, read_hello


def hello(name: str | None) -> bytes:
    """Return the ClientHello that OpenSSL sends for a server name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def test_server_name_is_found() -> None:
    assert read_hello(hello("API.Example")) == ClientHello(tls=True, sni="api.example")


def test_hello_without_a_server_name_is_tls() -> None:
    assert read_hello(hello(None)) == ClientHello(tls=True)


def test_other_protocols_are_not_tls() -> None:
    for data in (b"GET / HTTP/1.1\r\n", b"\x16\x02\x00", b"\x15\x03\x01\0\x02\x02\x28", b"SSH-2.0"):
        assert read_hello(data) == ClientHello()


def test_number_of_missing_bytes_is_reported() -> None:
    whole = hello("api.example")
    size = 0
    while missing := read_hello(whole[:size]).missing:
        size += missing
        assert size <= len(whole)
    assert read_hello(whole[:size]).sni == "api.example"


def test_hello_split_into_records_is_joined() -> None:
    body = hello("api.example")[5:]
    pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
    split = b"".join(b"\x16\x03\x01" + struct.pack("!H", len(piece)) + piece for piece in pieces)
    assert read_hello(split) == ClientHello(tls=True, sni="api.example")


def test_oversized_hello_is_not_waited_for() -> None:
    huge = b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(0x3FFC)
    assert read_hello(huge) == ClientHello()
    record = b"\x16\x03\x01\xff\xff\x01\x00\xff\xfb"
    assert read_hello(record + bytes(MAX_HELLO)) in (ClientHello(), ClientHello(tls=True))


def test_corrupt_hello_raises_nothing() -> None:
    rng = random.Random(5)
    whole = bytearray(hello("api.example"))
    for _ in range(3000):
        corrupt = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            corrupt[rng.randrange(len(corrupt))] = rng.randrange(256)
        read_hello(bytes(corrupt[: rng.randrange(len(corrupt) + 1)]))
