"""The certificate authority of a sandbox: its certificates, its file and its TLS contexts."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.egress.authority import MAX_CONTEXTS, Authority

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make("box")


async def handshake(authority: Authority, host: str, *, trusted: bytes | None = None) -> None:
    """Connect to a TLS server for a host, as a client with strict verification."""
    context = ssl.create_default_context(cadata=(trusted or authority.pem).decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda _, writer: accepted.put_nowait(writer),
        "127.0.0.1",
        0,
        ssl=authority.context_for(host),
    )
    async with server, asyncio.timeout(10):
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=host
        )
        writer.close()
        (await accepted.get()).close()


@pytest.mark.parametrize(
    "host",
    ["api.example", "1.2.3.4", "2606:4700::1", "xn--bcher-kva.example", f"{'a' * 63}.{'b' * 63}.c"],
)
async def test_strict_client_accepts_a_trusted_authority(authority: Authority, host: str) -> None:
    await handshake(authority, host)


async def test_client_that_trusts_another_authority_refuses(authority: Authority) -> None:
    other = Authority.make("box").pem
    with pytest.raises(ssl.SSLCertVerificationError):
        await handshake(authority, "api.example", trusted=other)


def test_authority_cannot_certify_another_authority(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    text = subprocess.run(
        ["openssl", "x509", "-noout", "-text", "-in", str(tmp_path / "ca.pem")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "CA:TRUE, pathlen:0" in text
    assert "Certificate Sign" in text


def test_authority_is_reloaded_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    first = Authority.open(str(path), "box")
    assert Authority.open(str(path), "box").pem == first.pem
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["ca.pem"]


def test_corrupt_authority_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("not PEM")
    replacement = Authority.open(str(path), "box")
    assert Authority.open(str(path), "box").pem == replacement.pem


def test_tls_contexts_are_cached_up_to_a_limit(authority: Authority) -> None:
    assert authority.context_for("cached.example") is authority.context_for("cached.example")
    fresh = Authority.make("box")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert next(iter(fresh._contexts.values()), None) is None
    first = fresh.context_for("first.example")
    created_at = fresh._contexts["first.example"][0]
    for number in range(MAX_CONTEXTS):
        fresh._contexts[f"h{number}"] = (created_at, context)
    assert fresh.context_for("last.example") is fresh.context_for("last.example")
    assert fresh.context_for("first.example") is not first
