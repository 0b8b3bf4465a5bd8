"""Responses of all kinds: early, late, without a length, over TCP and over TLS."""

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

from client.scripted_server import response, scripted_server
from smokebox import wire
from smokebox.client.address import Address, tls_context
from smokebox.client.client import connect
from smokebox.client.transport import Transport
from smokebox.errors import InvalidOption, LimitReached, SandboxGone, ServiceUnavailable
from smokebox.foundation.endpoint import socket_path
from smokebox.wire.failure import FailureResponse, failure_of, status_of
from smokebox.wire.responses import Count, Written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from client.server_process import ServerProcess

    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b'{"count":1}'


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def transport(path: str) -> Transport:
    return Transport(Address.parse(f"unix:{path}"))


@contextlib.asynccontextmanager
async def serving(path: str, serve: Serve) -> AsyncIterator[None]:
    """Run a server on a unix socket that reads the head of a request, then calls `serve`."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)

    async with _Tasks(one) as tasks:
        server = await asyncio.start_unix_server(tasks.serve, path)
        async with server:
            yield


class _Tasks:
    """Tasks of a server, one for each connection, cancelled at the end of the block."""

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


async def test_early_refusal_of_a_body_is_read(path: str) -> None:
    error = LimitReached("too much.", limit="x")
    body = msgspec.json.encode(FailureResponse(failure_of(error)))

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status_of(LimitReached), body))
        while await reader.read(1 << 16):
            pass

    async with serving(path, refuse), asyncio.timeout(10):
        with pytest.raises(LimitReached, match="too much"):
            await transport(path).request(Written, "PUT", "/x", data=endless())


async def test_response_is_read_while_the_source_of_a_body_waits(path: str) -> None:
    never = asyncio.Event()
    closed = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield b"a"
        try:
            await never.wait()
        finally:
            closed.set()

    async def respond(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, OK))
        await writer.drain()

    async with serving(path, respond), asyncio.timeout(10):
        assert (await transport(path).request(Count, "PUT", "/x", data=stuck())).count == 1
        assert closed.is_set()


async def test_response_may_start_before_the_body_is_sent(path: str) -> None:
    """A server sends heartbeats while it waits for the body."""
    started = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await started.wait()
        yield b"second"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\n\r\n")
        await writer.drain()
        started.set()
        body = await reader.readuntil(b"0\r\n\r\n")
        assert body == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(OK), OK))
        await writer.drain()

    async with serving(path, serve), asyncio.timeout(10):
        assert (await transport(path).request(Count, "PUT", "/x", data=pieces())).count == 1


async def test_error_of_the_source_of_a_body_is_raised_unchanged(path: str) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise ConnectionResetError("of the source")

    async def hold(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        # The missing last chunk shows that the body is incomplete.
        assert await reader.read() == b"1\r\na\r\n"

    async with serving(path, hold), asyncio.timeout(10):
        with pytest.raises(ConnectionResetError, match="of the source"):
            await transport(path).request(Written, "PUT", "/x", data=broken())


async def test_response_without_a_length_ends_with_its_connection(path: str) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + OK[:4])
        await writer.drain()
        writer.write(OK[4:])

    async with serving(path, serve):
        assert (await transport(path).request(Count, "POST", "/x")).count == 1


async def test_truncated_response_is_a_lost_connection(path: str) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, OK)[:-4])

    async with serving(path, serve):
        with pytest.raises(SandboxGone):
            await transport(path).request(Count, "POST", "/x")


async def test_informational_response_is_skipped(path: str) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    async with scripted_server(path, hints + response(200, OK)) as server:
        client = transport(path)
        assert [(await client.request(Count, "POST", "/x")).count for _ in range(2)] == [1, 1]
    assert server.connections == 1


async def test_second_response_to_a_request_is_not_used_for_the_next(path: str) -> None:
    async with scripted_server(path, response(200, OK) + response(200, b'{"count":2}')) as server:
        client = transport(path)
        assert [(await client.request(Count, "POST", "/x")).count for _ in range(3)] == [1, 1, 1]
    assert server.connections == 3


async def test_slow_reader_slows_down_the_server_and_does_not_time_out(
    path: str, monkeypatch: pytest.MonkeyPatch
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
        serving(path, serve),
        contextlib.aclosing(transport(path).download("/x")) as pieces,
    ):
        read = len(await anext(pieces))
        await asyncio.sleep(0.6)
        assert sent < size // 2
        read += sum([len(piece) async for piece in pieces])
    assert read == size


async def test_response_that_stops_in_its_middle_times_out(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.2)
    done = asyncio.Event()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome")
        await done.wait()

    async with serving(path, serve):
        pieces = transport(path).download("/x")
        assert await anext(pieces) == b"some"
        with pytest.raises(SandboxGone, match="was lost"):
            await anext(pieces)
        done.set()


async def test_leaving_a_stream_closes_its_connection(path: str) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsome\r\n")
        assert await reader.read() == b""
        closed.set()

    async with serving(path, serve), asyncio.timeout(10):
        async with contextlib.aclosing(transport(path).download("/x")) as pieces:
            assert await anext(pieces) == b"some"
        await closed.wait()


@pytest.mark.parametrize("key", ["k\r\nx-forwarded-for: 1.2.3.4", "k\n", "k\r"])
async def test_key_with_a_line_break_is_refused(path: str, key: str) -> None:
    async with scripted_server(path, response(200, OK)) as server:
        with pytest.raises(InvalidOption, match="must not contain line breaks"):
            await Transport(Address.parse(f"unix:{path}"), key).request(Count, "GET", "/x")
        with pytest.raises(InvalidOption, match="must not contain line breaks"):
            await transport(path).request(Count, "POST", "/x", idempotency_key=key)
    assert server.requests == []


async def test_address_may_have_a_path_and_credentials() -> None:
    async with scripted_server(None, response(200, OK)) as server:
        url = f"http://us%65r:p%40ss@127.0.0.1:{server.port}/below/"
        address = Address.parse(url)
        await Transport(address).request(Count, "GET", "/x")
        await Transport(address, "key").request(Count, "GET", "/x")
    assert set(server.requests) == {"GET /below/api/x"}
    assert [headers["authorization"] for headers in server.headers] == [
        "Basic dXNlcjpwQHNz",
        "Bearer key",
    ]
    assert {headers["host"] for headers in server.headers} == {f"127.0.0.1:{server.port}"}
    assert str(address) == f"http://127.0.0.1:{server.port}/below"


async def test_missing_server_is_reported_with_its_url() -> None:
    async with scripted_server(None) as server:
        url = f"http://127.0.0.1:{server.port}"
    with pytest.raises(ServiceUnavailable, match=f"no server responds at {url}: "):
        await Transport(Address.parse(url)).request(Count, "GET", "/x")


@contextlib.asynccontextmanager
async def behind_tls(socket: str, certificate: Path) -> AsyncIterator[int]:
    """Serve a unix socket on a TCP port by TLS, and yield the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(socket)
        try:
            await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))
        finally:
            upstream_writer.close()

    async with _Tasks(serve) as tasks:
        server = await asyncio.start_server(tasks.serve, "127.0.0.1", 0, ssl=context)
        async with server:
            yield server.sockets[0].getsockname()[1]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Create a self-signed certificate for 127.0.0.1 with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
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
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return file


async def test_sdk_works_over_tls(
    server: ServerProcess, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls_context.cache_clear()
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
    tls_context.cache_clear()


async def test_untrusted_certificate_is_refused(server: ServerProcess, certificate: Path) -> None:
    async with behind_tls(socket_path(server.home), certificate) as port:
        with pytest.raises(ServiceUnavailable, match="certificate"):
            await connect(f"https://127.0.0.1:{port}").health()
