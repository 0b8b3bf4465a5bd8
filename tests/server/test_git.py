"""Repositories over HTTP: cloned, refused, broken off."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest_asyncio

from asking import ask
from engine.git.git_server import GitServer, make_repository
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from smokebox.server.server import RunningServer

BOX = "/api/sandboxes/box"
CHECKOUT = f"{BOX}/git/checkout"


@pytest_asyncio.fixture
async def git(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncIterator[GitServer]:
    """A git server on this machine, and a sandbox to clone into."""
    root = tmp_path / "repositories"
    root.mkdir()
    make_repository(root)
    await ask(http.put(BOX, json={}))
    server = GitServer(root)
    async with server.serving():
        yield server


async def test_a_repository_is_cloned(http: aiohttp.ClientSession, git: GitServer) -> None:
    body = {"url": f"{git.origin}/plain/project.git", "target": "here", "depth": 1}
    answer = await ask(http.post(CHECKOUT, json=body))
    assert (answer.status, answer.body["url"]) == (200, body["url"])
    assert answer.body["target"] == "/workspace/here"
    command = "git -c safe.directory=/workspace/here -C here rev-parse HEAD"
    head = await ask(http.post(f"{BOX}/exec", json={"command": command}))
    assert head.body["stdout"].strip() == answer.body["commit"]


async def test_what_cannot_be_cloned_says_why(http: aiohttp.ClientSession, git: GitServer) -> None:
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
        answer = await ask(http.post(CHECKOUT, json=body))
        assert (answer.status, answer.code) == expected, body
    missing = await ask(http.post("/api/sandboxes/ghost/git/checkout", json={"url": good}))
    assert (missing.status, missing.code) == (404, "not_found")


async def test_a_password_is_in_no_answer(http: aiohttp.ClientSession, git: GitServer) -> None:
    git.closed = True
    body = {"url": f"{git.origin}/plain/project.git", "username": "u", "password": "s3cr3t-pass"}
    async with http.post(CHECKOUT, json=body) as answer:
        assert answer.status == 422
        assert "s3cr3t-pass" not in await answer.text()


async def test_who_leaves_ends_the_clone(
    http: aiohttp.ClientSession, server: RunningServer, git: GitServer
) -> None:
    body = {"url": f"{git.origin}/stall/project.git"}
    asking = asyncio.create_task(ask(http.post(CHECKOUT, json=body)))
    await git.reached.wait()
    asking.cancel()
    await asyncio.wait([asking])
    sandbox = server.state.host.sandbox("box")
    await _until(lambda: sandbox.life._active == 0)
    assert not await sandbox.exists("/workspace/project")


async def test_a_server_of_many_users_asks_public_addresses_only(
    git: GitServer, tmp_path: Path
) -> None:
    settings = ServerSettings(home=str(tmp_path / "keyed"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            await ask(http.put(BOX, json={}))
            body = {"url": f"{git.origin}/plain/project.git"}
            answer = await ask(http.post(CHECKOUT, json=body))
    assert answer.status in (400, 422)
    assert git.seen == []


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
