"""The first bytes of a connection: of TLS or not, and for whom."""

from __future__ import annotations

import random
import ssl
import struct

import pytest

from smokebox.engine.egress.client_hello import MAX_HELLO, ClientHello, read_hello


def hello(name: str | None) -> bytes:
    """What OpenSSL sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def test_the_name_is_found() -> None:
    assert read_hello(hello("API.Example")) == ClientHello(tls=True, sni="api.example")


def test_a_hello_without_a_name_is_one() -> None:
    assert read_hello(hello(None)) == ClientHello(tls=True)


def test_what_is_not_tls_is_none() -> None:
    for data in (b"GET / HTTP/1.1\r\n", b"\x16\x02\x00", b"\x15\x03\x01\0\x02\x02\x28", b"SSH-2.0"):
        assert read_hello(data) == ClientHello()


def test_it_says_how_many_bytes_are_missing() -> None:
    whole = hello("api.example")
    have = 0
    while missing := read_hello(whole[:have]).missing:
        have += missing
        assert have <= len(whole)
    assert read_hello(whole[:have]).sni == "api.example"


def test_a_hello_in_several_records_is_put_together() -> None:
    body = hello("api.example")[5:]
    pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
    split = b"".join(b"\x16\x03\x01" + struct.pack("!H", len(one)) + one for one in pieces)
    assert read_hello(split) == ClientHello(tls=True, sni="api.example")


def test_one_that_never_ends_is_given_up() -> None:
    huge = b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(0x3FFC)
    assert read_hello(huge) == ClientHello()
    record = b"\x16\x03\x01\xff\xff\x01\x00\xff\xfb"
    assert read_hello(record + bytes(MAX_HELLO)) in (ClientHello(), ClientHello(tls=True))


def test_no_bytes_break_it() -> None:
    chance = random.Random(5)
    whole = bytearray(hello("api.example"))
    for _ in range(3000):
        broken = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        read_hello(bytes(broken[: chance.randrange(len(broken) + 1)]))
