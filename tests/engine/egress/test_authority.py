"""Certificates made on the spot, as clients of every kind check them."""

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


async def shake_hands(authority: Authority, host: str, *, trusted: bytes | None = None) -> None:
    """Be a strict client of a server of that name."""
    context = ssl.create_default_context(cadata=(trusted or authority.pem).decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    served: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda _, writer: served.put_nowait(writer), "127.0.0.1", 0, ssl=authority.context_for(host)
    )
    async with server, asyncio.timeout(10):
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=host
        )
        writer.close()
        (await served.get()).close()


@pytest.mark.parametrize(
    "host",
    ["api.example", "1.2.3.4", "2606:4700::1", "xn--bcher-kva.example", f"{'a' * 63}.{'b' * 63}.c"],
)
async def test_a_strict_client_that_trusts_it_accepts(authority: Authority, host: str) -> None:
    await shake_hands(authority, host)


async def test_one_that_trusts_another_does_not(authority: Authority) -> None:
    other = Authority.make("box").pem
    with pytest.raises(ssl.SSLCertVerificationError):
        await shake_hands(authority, "api.example", trusted=other)


def test_it_can_make_no_other_authority(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    said = subprocess.run(
        ["openssl", "x509", "-noout", "-text", "-in", str(tmp_path / "ca.pem")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "CA:TRUE, pathlen:0" in said
    assert "Certificate Sign" in said


def test_it_is_the_same_after_a_restart_and_only_ours_to_read(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    first = Authority.open(str(path), "box")
    assert Authority.open(str(path), "box").pem == first.pem
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["ca.pem"]


def test_one_that_is_broken_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nonsense")
    made = Authority.open(str(path), "box")
    assert Authority.open(str(path), "box").pem == made.pem


def test_what_was_made_is_used_again_and_not_without_end(authority: Authority) -> None:
    assert authority.context_for("again.example") is authority.context_for("again.example")
    small = Authority.make("box")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = next(iter(small._contexts.values()), None)
    assert made is None
    first = small.context_for("first.example")
    since = small._contexts["first.example"][0]
    for number in range(MAX_CONTEXTS):
        small._contexts[f"h{number}"] = (since, context)
    assert small.context_for("last.example") is small.context_for("last.example")
    assert small.context_for("first.example") is not first
