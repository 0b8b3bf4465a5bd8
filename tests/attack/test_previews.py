"""Attacks by the server behind a preview: on this server, and on its other clients."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio

from attack import hostile_backend
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.preview import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BACKEND = Path(hostile_backend.__file__).read_text()
TIMEOUT = 1.0
# Of requests at the same time, each on its own connection to the backend.
ATTACKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A server with a hostile backend behind a preview, and a client of both."""

    url: str
    headers: dict[str, str]
    http: aiohttp.ClientSession

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.http.get(f"{self.url}/{path}", headers=self.headers) as response:
            return response.status, await response.read()

    async def health(self) -> int:
        async with asyncio.timeout(5), self.http.get(f"{self.url}/api/health") as response:
            return response.status


@pytest_asyncio.fixture
async def victim(tmp_path: Path) -> AsyncIterator[Victim]:
    settings = ServerSettings(
        home=str(tmp_path / "home"), host="127.0.0.1", pool=0, preview_timeout=TIMEOUT
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with run_server(settings) as server, aiohttp.ClientSession(connector=connector) as http:
        sandbox = server.state.host.sandbox("attacker")
        backend = await sandbox.start_process(["python3", "-c", BACKEND, "3000"])
        await backend.wait_for_log("listening", 20)
        ports = f"{server.url}/api/sandboxes/attacker/ports"
        async with http.post(ports, json={"port": 3000}) as response:
            exposed = await response.json()
        headers = {"host": f"{exposed['label']}.localhost", TOKEN_HEADER: exposed["token"]}
        assert server.url is not None
        yield Victim(url=server.url, headers=headers, http=http)


async def check_health(victim: Victim, attacks: asyncio.Future[list[object]]) -> None:
    """Request the health of the server until all attacks have ended."""
    while not attacks.done():
        assert await victim.health() == 200
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("status-line", 502),
        ("field", 502),
        ("fields", 502),
        ("interim", 502),
        ("slow-head", 504),
        ("slow-interim", 502),
        ("silent", 504),
    ],
)
async def test_endless_or_slow_response_head_is_refused(
    victim: Victim, path: str, status: int
) -> None:
    attacks = asyncio.gather(*(victim.get(path) for _ in range(ATTACKS)))
    async with asyncio.timeout(15):
        await check_health(victim, attacks)  # type: ignore[arg-type]
        assert [found for found, _ in await attacks] == [status] * ATTACKS
    assert (await victim.get("fine"))[0] == 200


@pytest.mark.parametrize("path", ["trailers", "extensions", "chunk-size", "silent-body"])
async def test_endless_or_silent_response_body_breaks_the_connection(
    victim: Victim, path: str
) -> None:
    attacks = asyncio.gather(*(victim.get(path) for _ in range(ATTACKS)), return_exceptions=True)
    async with asyncio.timeout(15):
        await check_health(victim, attacks)  # type: ignore[arg-type]
        assert {type(error) for error in await attacks} <= {
            aiohttp.ClientPayloadError,
            aiohttp.ClientOSError,
            aiohttp.ServerDisconnectedError,
        }
    assert (await victim.get("fine"))[0] == 200


@pytest.mark.parametrize("path", ["two-at-once", "two"])
async def test_second_response_to_one_request_is_never_that_of_another(
    victim: Victim, path: str
) -> None:
    assert await victim.get(path) == (200, b"one")
    await asyncio.sleep(0.3)
    assert await victim.get("next") == (200, b"next on 2")


async def test_endless_tiny_chunks_leave_turns_to_others(victim: Victim) -> None:
    """They are valid: the client that requests them gets them until it leaves."""
    async with asyncio.timeout(15):
        attacks = [asyncio.ensure_future(victim.get("tiny-chunks")) for _ in range(ATTACKS)]
        for _ in range(10):
            assert await victim.health() == 200
            await asyncio.sleep(0.05)
        assert not any(attack.done() for attack in attacks)
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)


async def test_connection_without_extra_bytes_is_used_again(victim: Victim) -> None:
    for _ in range(3):
        assert await victim.get("next") == (200, b"next on 1")
