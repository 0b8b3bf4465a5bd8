"""Git checkouts over HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest_asyncio

from engine.git.git_server import GitServer, make_repository
from http_response import fetch
from server.boxes import eventually
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.server.server import RunningServer

SANDBOX = "/api/sandboxes/box"
CHECKOUT = f"{SANDBOX}/git/checkout"


@pytest_asyncio.fixture
async def git(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncIterator[GitServer]:
    """A git server on this machine, and a sandbox to clone into."""
    root = tmp_path / "repositories"
    root.mkdir()
    make_repository(root)
    await fetch(http.put(SANDBOX, json={}))
    server = GitServer(root)
    async with server.serving():
        yield server


async def test_checkout_clones_a_repository(http: aiohttp.ClientSession, git: GitServer) -> None:
    body = {"url": f"{git.origin}/plain/project.git", "target": "here", "depth": 1}
    response = await fetch(http.post(CHECKOUT, json=body))
    assert (response.status, response.body["url"]) == (200, body["url"])
    assert response.body["target"] == "/workspace/here"
    command = "git -c safe.directory=/workspace/here -C here rev-parse HEAD"
    head = await fetch(http.post(f"{SANDBOX}/exec", json={"command": command}))
    assert head.body["stdout"].strip() == response.body["commit"]


async def test_invalid_checkouts_are_refused(http: aiohttp.ClientSession, git: GitServer) -> None:
    good = f"{git.origin}/plain/project.git"
    bad = (400, "invalid_option")
    for body, expected in (
        ({}, bad),
        ({"url": "ssh://example.com/a.git"}, bad),
        ({"url": good, "depth": 0}, bad),
        ({"url": good, "branch": "a..b"}, bad),
        ({"url": good, "timeout": -1}, bad),
        ({"url": good, "target": "/etc"}, (409, "path_exists")),
        ({"url": f"{git.origin}/plain/none.git"}, (422, "git_failed")),
        ({"url": good, "branch": "none"}, (422, "git_failed")),
        ({"url": f"{git.origin}/stall/project.git", "timeout": 0.3}, (504, "deadline_exceeded")),
    ):
        response = await fetch(http.post(CHECKOUT, json=body))
        assert (response.status, response.code) == expected, body
    missing = await fetch(http.post("/api/sandboxes/ghost/git/checkout", json={"url": good}))
    assert (missing.status, missing.code) == (404, "not_found")


async def test_responses_do_not_contain_the_password(
    http: aiohttp.ClientSession, git: GitServer
) -> None:
    git.requires_token = True
    body = {"url": f"{git.origin}/plain/project.git", "username": "u", "password": "s3cr3t-pass"}
    async with http.post(CHECKOUT, json=body) as response:
        assert response.status == 422
        assert "s3cr3t-pass" not in await response.text()


async def test_disconnect_cancels_the_clone(
    http: aiohttp.ClientSession, server: RunningServer, git: GitServer
) -> None:
    body = {"url": f"{git.origin}/stall/project.git"}
    checkout = asyncio.create_task(fetch(http.post(CHECKOUT, json=body)))
    await git.reached.wait()
    checkout.cancel()
    await asyncio.wait([checkout])
    sandbox = server.state.host.sandbox("box")
    await eventually(lambda: sandbox.lifecycle._active == 0)
    assert not await sandbox.exists("/workspace/project")


async def test_key_reaches_public_addresses_only(git: GitServer, tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "keyed"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as operator:
            key = (await fetch(operator.post("/api/keys", json={"name": "x"}))).body["key"]
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as http:
            await fetch(http.put(SANDBOX, json={}))
            body = {"url": f"{git.origin}/plain/project.git"}
            response = await fetch(http.post(CHECKOUT, json=body))
    assert response.status in (400, 422)
    assert git.seen == []
