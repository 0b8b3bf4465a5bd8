"""Answers as they come: early, late, without a length, over TCP and over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from typing import TYPE_CHECKING, Self

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from client.scripted import answer, scripted
from smokebox import wire
from smokebox.client import connection
from smokebox.client.client import connect
from smokebox.client.connection import Address
from smokebox.client.transport import Transport
from smokebox.errors import InvalidOption, LimitReached, SandboxGone, ServiceUnavailable
from smokebox.foundation.endpoint import socket_path
from smokebox.wire.failure import FailureAnswer, failure_of, status_of
from smokebox.wire.responses import Count, Written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from client.served import Served

    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b'{"count":1}'


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def transport(place: str) -> Transport:
    return Transport(Address.parse(f"unix:{place}"))


@contextlib.asynccontextmanager
async def serving(place: str, serve: Serve) -> AsyncIterator[None]:
    """A server on a unix socket that reads the head of a request, and then does as it likes."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)

    async with _Tasks(one) as tasks:
        server = await asyncio.start_unix_server(tasks.serve, place)
        async with server:
            yield


class _Tasks:
    """Connections, each served to its end, or until the block ends."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield bytes(1 << 16)


async def test_who_refuses_a_body_early_is_heard(place: str) -> None:
    error = LimitReached("too much.", limit="x")
    body = msgspec.json.encode(FailureAnswer(failure_of(error)))

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(status_of(LimitReached), body))
        while await reader.read(1 << 16):
            pass

    async with serving(place, refuse), asyncio.timeout(10):
        with pytest.raises(LimitReached, match="too much"):
            await transport(place).upload(Written, "PUT", "/x", endless())


async def test_a_refusal_is_heard_while_the_source_of_a_body_waits(place: str) -> None:
    waiting = asyncio.Event()
    left = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield b"a"
        try:
            await waiting.wait()
        finally:
            left.set()

    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, OK))
        await writer.drain()

    async with serving(place, refuse), asyncio.timeout(10):
        assert (await transport(place).upload(Count, "PUT", "/x", stuck())).count == 1
        assert left.is_set()


async def test_an_answer_may_begin_before_the_body_is_sent(place: str) -> None:
    """As one does that shows signs of life meanwhile."""
    begun = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await begun.wait()
        yield b"second"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\n\r\n")
        await writer.drain()
        begun.set()
        body = await reader.readuntil(b"0\r\n\r\n")
        assert body == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(OK), OK))
        await writer.drain()

    async with serving(place, serve), asyncio.timeout(10):
        assert (await transport(place).upload(Count, "PUT", "/x", pieces())).count == 1


async def test_what_the_source_of_a_body_raises_is_raised_as_it_is(place: str) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise ConnectionResetError("of the source")

    async def hold(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        # The end of the connection tells that this is no whole body.
        assert await reader.read() == b"1\r\na\r\n"

    async with serving(place, hold), asyncio.timeout(10):
        with pytest.raises(ConnectionResetError, match="of the source"):
            await transport(place).upload(Written, "PUT", "/x", broken())


async def test_an_answer_without_a_length_ends_with_its_connection(place: str) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + OK[:4])
        await writer.drain()
        writer.write(OK[4:])

    async with serving(place, serve):
        assert (await transport(place).ask(Count, "POST", "/x")).count == 1


async def test_an_answer_that_is_cut_off_is_no_answer(place: str) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, OK)[:-4])

    async with serving(place, serve):
        with pytest.raises(SandboxGone):
            await transport(place).ask(Count, "POST", "/x")


async def test_words_before_an_answer_are_not_the_answer(place: str) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    async with scripted(place, hints + answer(200, OK)) as server:
        once = transport(place)
        assert [(await once.ask(Count, "POST", "/x")).count for _ in range(2)] == [1, 1]
    assert server.connections == 1


async def test_a_second_answer_to_a_request_is_not_taken_for_the_next(place: str) -> None:
    async with scripted(place, answer(200, OK) + answer(200, b'{"count":2}')) as server:
        once = transport(place)
        assert [(await once.ask(Count, "POST", "/x")).count for _ in range(3)] == [1, 1, 1]
    assert server.connections == 3


async def test_a_slow_reader_is_no_silent_server_and_holds_little(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.2)
    size, sent = 16 << 20, 0

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode())
        while sent < size:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with (
        serving(place, serve),
        contextlib.aclosing(transport(place).bytes_of("/x")) as pieces,
    ):
        read = len(await anext(pieces))
        await asyncio.sleep(0.6)
        assert sent < size // 2
        read += sum([len(piece) async for piece in pieces])
    assert read == size


async def test_an_answer_that_stops_in_its_middle_is_a_silent_server(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.2)
    over = asyncio.Event()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome")
        await over.wait()

    async with serving(place, serve):
        pieces = transport(place).bytes_of("/x")
        assert await anext(pieces) == b"some"
        with pytest.raises(SandboxGone, match="went away"):
            await anext(pieces)
        over.set()


async def test_whoever_leaves_a_stream_ends_its_connection(place: str) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsome\r\n")
        assert await reader.read() == b""
        ended.set()

    async with serving(place, serve), asyncio.timeout(10):
        async with contextlib.aclosing(transport(place).bytes_of("/x")) as pieces:
            assert await anext(pieces) == b"some"
        await ended.wait()


@pytest.mark.parametrize("key", ["k\r\nx-forwarded-for: 1.2.3.4", "k\n", "k\r"])
async def test_no_key_can_be_more_than_a_header(place: str, key: str) -> None:
    async with scripted(place, answer(200, OK)) as server:
        with pytest.raises(InvalidOption, match="no line breaks"):
            await Transport(Address.parse(f"unix:{place}"), key).ask(Count, "GET", "/x")
        with pytest.raises(InvalidOption, match="no line breaks"):
            await transport(place).ask(Count, "POST", "/x", repeat_key=key)
    assert server.asked == []


async def test_an_address_may_have_a_path_and_a_login() -> None:
    async with scripted(None, answer(200, OK)) as server:
        url = f"http://us%65r:p%40ss@127.0.0.1:{server.port}/below/"
        address = Address.parse(url)
        await Transport(address).ask(Count, "GET", "/x")
        await Transport(address, "key").ask(Count, "GET", "/x")
    assert set(server.asked) == {"GET /below/api/x"}
    assert [one["authorization"] for one in server.headers] == [
        "Basic dXNlcjpwQHNz",
        "Bearer key",
    ]
    assert {one["host"] for one in server.headers} == {f"127.0.0.1:{server.port}"}
    assert str(address) == f"http://127.0.0.1:{server.port}/below"


async def test_nobody_at_a_port_is_said_with_the_address() -> None:
    async with scripted(None) as server:
        url = f"http://127.0.0.1:{server.port}"
    with pytest.raises(ServiceUnavailable, match=f"no server answers at {url}: "):
        await Transport(Address.parse(url)).ask(Count, "GET", "/x")


@contextlib.asynccontextmanager
async def behind_tls(socket: str, certificate: Path) -> AsyncIterator[int]:
    """A port of this machine that leads to a unix socket, by TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(socket)
        try:
            await asyncio.gather(pump(reader, back), pump(there, writer))
        finally:
            back.close()

    async with _Tasks(serve) as tasks:
        server = await asyncio.start_server(tasks.serve, "127.0.0.1", 0, ssl=context)
        async with server:
            yield server.sockets[0].getsockname()[1]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 with its key, in one file, which only itself vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "certificate.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return file


async def test_everything_works_over_tls(
    server: Served, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    connection._tls.cache_clear()
    async with behind_tls(socket_path(server.home), certificate) as port:
        client = connect(f"https://127.0.0.1:{port}")
        sandbox = client.sandbox("over-tls")
        assert (await sandbox.exec("echo hello")).stdout == "hello\n"
        assert [one.data async for one in sandbox.exec_stream("echo hello")] == ["hello\n"]
        await sandbox.write_file("f", b"x" * 3_000_000)
        assert len(await sandbox.read_bytes("f")) == 3_000_000
        async with await sandbox.create_terminal(command=["echo", "hello"]) as terminal:
            assert b"".join([data async for data in terminal]) == b"hello\r\n"
        await sandbox.destroy()
        await client.aclose()
    connection._tls.cache_clear()


async def test_a_certificate_that_nobody_vouches_for_is_refused(
    server: Served, certificate: Path
) -> None:
    async with behind_tls(socket_path(server.home), certificate) as port:
        with pytest.raises(ServiceUnavailable, match="certificate"):
            await connect(f"https://127.0.0.1:{port}").health()
