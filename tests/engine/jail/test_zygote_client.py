"""Requests to a zygote that is slow, or does not respond."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.jail import zygote_client
from smokebox.engine.jail.zygote_client import ZygoteClient
from smokebox.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECONDS = 2.0


class ConnectedClient(ZygoteClient):
    """A client of this test, which responds in place of a zygote."""

    def __init__(self) -> None:
        super().__init__()
        self._control, self.zygote = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._receive)

    def _connect(self) -> socket.socket:
        assert self._control is not None
        return self._control

    def refuse(self) -> None:
        """Respond to the first request that waits."""
        key = json.loads(self.zygote.recv(1 << 16))["key"]
        self.zygote.send(json.dumps({"key": key, "error": 28, "text": "refused"}).encode())


@pytest.fixture(autouse=True)
def _short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_client, "RESPONSE_SECONDS", SECONDS)


@pytest.fixture
async def client() -> AsyncIterator[ConnectedClient]:
    client = ConnectedClient()
    yield client
    client.close()
    client.zygote.close()


async def test_request_waits_for_those_before_it_as_long_as_they_are_responded_to(
    client: ConnectedClient,
) -> None:
    waiting = [asyncio.ensure_future(client.fork({"key": str(one)}, ())) for one in range(6)]
    for _ in waiting:
        await asyncio.sleep(SECONDS / 4)
        client.refuse()
    assert {type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {
        OSError
    }


async def test_zygote_that_responds_to_nothing_is_stopped(client: ConnectedClient) -> None:
    with pytest.raises(ServiceUnavailable, match="does not respond"):
        await client.fork({"key": "one"}, ())
    assert client.zygote.recv(1 << 16)
    assert not client.zygote.recv(1)
