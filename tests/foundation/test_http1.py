"""HTTP/1.1 heads and bodies: ambiguous messages are refused, the rest parses as in h11."""

from __future__ import annotations

import asyncio
import random
import socket

import h11
import pytest

from smokebox.foundation.http1.body import BodyReader
from smokebox.foundation.http1.connection import Connection, ConnectionLost
from smokebox.foundation.http1.head import (
    HOP_BY_HOP,
    MalformedMessage,
    RequestHead,
    parse_request,
    parse_response,
    write_request,
)

HOST = b"Host: a.test\r\n"


def request(fields: bytes = HOST, line: bytes = b"GET / HTTP/1.1\r\n") -> RequestHead:
    return parse_request(line + fields + b"\r\n")


def test_request_head_leaves_out_hop_by_hop_headers() -> None:
    head = request(
        b"hOst: a.test:80\r\nX-A:  1 \r\nx-a:\t2\r\nConnection: x-b,Close\r\nX-B: 3\r\n"
        b"Content-Length: 7\r\nUpgrade: h2c\r\n",
        b"PURGE /x?y HTTP/1.1\r\n",
    )
    assert (head.method, head.target, head.host) == ("PURGE", "/x?y", "a.test:80")
    assert head.fields == [("X-A", "1"), ("x-a", "2")]
    assert (head.framing, head.keep_alive, head.upgrade) == (7, False, "")


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        HOST + HOST,
        HOST + b"Content-Length: 1\r\nContent-Length: 1\r\n",
        HOST + b"Content-Length: 1, 1\r\n",
        HOST + b"Content-Length: +1\r\n",
        HOST + b"Content-Length: -1\r\n",
        HOST + b"Content-Length: 0x1\r\n",
        HOST + b"Content-Length: 1 1\r\n",
        HOST + b"Content-Length: \r\n",
        HOST + b"Content-Length: 9999999999999999999\r\n",
        HOST + "Content-Length: ²\r\n".encode("latin-1"),
        HOST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        HOST + b"Transfer-Encoding: chunked, identity\r\n",
        HOST + b"Transfer-Encoding: gzip, chunked\r\n",
        HOST + b"Transfer-Encoding: xchunked\r\n",
        HOST + b"Transfer-Encoding: \x0bchunked\r\n",
        HOST + b"Transfer-Encoding : chunked\r\n",
        HOST + b" Transfer-Encoding: chunked\r\n",
        HOST + b"X: 1\r\n folded\r\n",
        HOST + b"X: 1\r\n\tfolded\r\n",
        HOST + b"X: a\nY: b\r\n",
        HOST + b"X: a\rY: b\r\n",
        HOST + b"X: a\x00b\r\n",
        HOST + b"X: a\x7fb\r\n",
        HOST + b"X\r\n",
        HOST + b": x\r\n",
        HOST + b"X Y: z\r\n",
        HOST + b"X\xe9: z\r\n",
        HOST + b"Expect: a-miracle\r\n",
        HOST + b"X: 1\r\n" * 201,
    ],
)
def test_ambiguous_headers_are_refused(fields: bytes) -> None:
    with pytest.raises(MalformedMessage):
        request(fields)


@pytest.mark.parametrize(
    "line",
    [
        b"GET /\r\n",
        b"GET / HTTP/1.1 \r\n",
        b"GET  / HTTP/1.1\r\n",
        b"GET\t/ HTTP/1.1\r\n",
        b" GET / HTTP/1.1\r\n",
        b"GET / HTTP/2.0\r\n",
        b"GET / HTTP/1.10\r\n",
        b"GET / http/1.1\r\n",
        b"GET /a b HTTP/1.1\r\n",
        b"GET /\x01 HTTP/1.1\r\n",
        b"G@T / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\n",
        b"\r\nGET / HTTP/1.1\r\n",
    ],
)
def test_invalid_request_line_is_refused(line: bytes) -> None:
    with pytest.raises(MalformedMessage):
        request(line=line)


def test_http_1_0_client_cannot_send_chunks_and_closes_by_default() -> None:
    old = b"GET / HTTP/1.0\r\n"
    with pytest.raises(MalformedMessage):
        request(HOST + b"Transfer-Encoding: chunked\r\n", old)
    assert not request(HOST, old).keep_alive
    assert request(HOST + b"Connection: Keep-Alive\r\n", old).keep_alive


@pytest.mark.parametrize(
    ("raw", "method", "framing"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", "GET", 3),
        (b"HTTP/1.1 200\r\nTransfer-Encoding: Chunked\r\n\r\n", "GET", "chunked"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", "HEAD", 0),
        (b"HTTP/1.1 204 No\r\nContent-Length: 3\r\n\r\n", "GET", 0),
        (b"HTTP/1.1 304 No\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", 0),
        (b"HTTP/1.0 200 OK\r\n\r\n", "GET", "close"),
        (b"\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", "GET", 3),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n", "GET", "close"),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", "chunked"),
    ],
)
def test_response_framing(raw: bytes, method: str, framing: object) -> None:
    assert parse_response(raw, method).framing == framing


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
    ],
)
def test_invalid_response_is_a_bad_gateway(raw: bytes) -> None:
    with pytest.raises(MalformedMessage) as caught:
        parse_response(raw, "GET")
    assert caught.value.status == 502


def test_long_run_of_blanks_is_refused_in_linear_time() -> None:
    with pytest.raises(MalformedMessage):
        request(HOST + b"X:" + b" \t" * 30_000 + b"\x00\r\n")


class ScriptedConnection(Connection):
    """A connection that receives fixed data in chunks of random size."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        super().__init__(timeout=5)
        self._script = data
        self._rng = rng

    def _receive(self) -> asyncio.Future[None]:
        received = super()._receive()
        size = self._rng.randrange(1, 40)
        piece, self._script = self._script[:size], self._script[size:]
        if piece:
            self.data_received(piece)
        else:
            self._end()
        return received


async def read_body(data: bytes, rng: random.Random) -> bytes:
    reader = BodyReader(ScriptedConnection(data, rng), "chunked")
    return b"".join([piece async for piece in reader])


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"0\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"5;a=b\r\nhello\r\n00A\r\n0123456789\r\n0\r\nX: 1\r\nY: 2\r\n\r\n", b"hello0123456789"),
    ],
)
async def test_chunks_are_joined_for_any_read_size(data: bytes, body: bytes) -> None:
    for seed in range(20):
        assert await read_body(data, random.Random(seed)) == body


@pytest.mark.parametrize(
    "data",
    [
        b"5 \r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhell\r\n0\r\n\r\n",
        b"\r\nhello\r\n0\r\n\r\n",
        b"-1\r\nhello\r\n0\r\n\r\n",
        b"5;a\x00b\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        b"0\r\nGET / HTTP/1.1\r\n\r\n",
        b"0\r\nX : 1\r\n\r\n",
        b"1;" + b"a" * 5000 + b"\r\nx\r\n0\r\n\r\n",
        b"0\r\n" + b"X: " + b"y" * 4000 + b"\r\n",
    ],
)
async def test_invalid_chunks_are_refused(data: bytes) -> None:
    for seed in range(5):
        with pytest.raises((MalformedMessage, ConnectionLost)):
            await read_body(data * 5, random.Random(seed))


def mutate(rng: random.Random) -> bytes:
    """Return a request with some bytes replaced by ones that confuse parsers."""
    raw = bytearray(
        rng.choice(
            [
                b"GET /a?b HTTP/1.1\r\nHost: a.test\r\nAccept: */*\r\n\r\n",
                b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhello",
                b"PUT /x HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n",
            ]
        )
    )
    odd = [b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b",", b";", b"0", b"f", b"-", b"\xff"]
    odd += [b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"chunked", b"GET "]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw))
        raw[at : at + rng.randrange(3)] = rng.choice(odd)
    return bytes(raw)


async def read(raw: bytes, rng: random.Random) -> tuple[str, str, list[str], bytes] | None:
    """Parse a request and write it again; None if it is refused."""
    connection = ScriptedConnection(raw, rng)
    try:
        found = await connection.read_head()
        if found is None:
            return None
        head = parse_request(found)
        body = b"".join([piece async for piece in BodyReader(connection, head.framing)])
    except (MalformedMessage, ConnectionLost):
        return None
    written = write_request(head.method, head.target, [("Host", head.host), *head.fields])
    assert parse_request(written).fields == head.fields
    return head.method, head.target, [value for _, value in head.fields], body


def read_by_h11(raw: bytes) -> tuple[str, str, list[str], bytes]:
    """Parse the same request with h11. Raises the errors of h11."""
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(raw)
    event = peer.next_event()
    assert isinstance(event, h11.Request), event
    hop_by_hop = [name.encode() for name in HOP_BY_HOP]
    values = [value.decode("latin-1") for name, value in event.headers if name not in hop_by_hop]
    body = b""
    while isinstance(data := peer.next_event(), h11.Data):
        body += data.data
    assert isinstance(data, h11.EndOfMessage), data
    return event.method.decode(), event.target.decode(), values, body


async def test_accepted_requests_parse_the_same_in_h11() -> None:
    rng = random.Random(20_240)
    passed = 0
    for number in range(4000):
        raw = mutate(rng)
        ours = await read(raw, rng)
        if ours is None or any(ord(character) > 126 for character in ours[1]):
            continue
        passed += 1
        try:
            theirs = read_by_h11(raw)
        except h11.RemoteProtocolError as error:
            pytest.fail(f"{raw!r} is refused by h11: {error}")
        assert ours == theirs, raw
        if number % 500 == 0:
            await asyncio.sleep(0)
    assert passed > 200


async def test_writing_to_a_broken_connection_raises_before_the_loop_says_so() -> None:
    near, far = socket.socketpair()
    connection = Connection(timeout=5)
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=near)
    far.close()
    with pytest.raises(ConnectionLost):
        for _ in range(100):
            connection.write(b"x")
            # Does not wait, because nothing is buffered.
            await connection.drain()
    connection.abort()
    await asyncio.sleep(0)
