"""Addresses that the engine connects to for a clone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.egress import address_guard
from smokebox.engine.git import remote
from smokebox.engine.git.repository import parse_repository
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from engine.git.git_server import GitServer
    from smokebox.engine import Sandbox


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "localhost",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[fe80::1]",
        "[fd00::1]",
        "[64:ff9b::7f00:1]",
    ],
)
async def test_private_addresses_are_refused_by_default(sandbox: Sandbox, address: str) -> None:
    with pytest.raises(InvalidOption, match="public address") as caught:
        await sandbox.git_checkout(f"http://{address}/x.git")
    assert caught.value.option == "allow_private"
    assert not await sandbox.exists("x")


async def test_refused_server_is_not_contacted(sandbox: Sandbox, server: GitServer) -> None:
    for origin in (server.origin, server.origin.replace("127.0.0.1", "localhost")):
        with pytest.raises(InvalidOption):
            await sandbox.git_checkout(f"{origin}/plain/project.git")
    assert not server.seen


async def test_redirect_to_a_private_address_is_refused(
    sandbox: Sandbox, server: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Treat the server as public; the target of its redirect is not.
    monkeypatch.setattr(address_guard, "is_public", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(address_guard, "is_own", lambda address: False)
    await sandbox.git_checkout(f"{server.origin}/moved/project.git")
    with pytest.raises(InvalidOption, match=r"169\.254\.169\.254 does not lead"):
        await sandbox.git_checkout(f"{server.origin}/local/project.git", "t")


async def test_name_with_one_private_address_is_refused() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "10.0.0.1"]

    repository = parse_repository("http://example.org/x.git")
    server = remote.GitRemote(repository, resolver=resolve)
    with pytest.raises(InvalidOption, match="does not lead to a public address"):
        async with server.request("GET", remote.REFS, []):
            pass
