"""SIGKILL of a server before and within the end of the lifetime of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import aiohttp
import pytest

from engine.leftovers import find_leftovers
from http_response import fetch
from killable_server import new_home, run_killable_server

pytestmark = pytest.mark.timeout(120)

SANDBOXES = "http://localhost/api/sandboxes"


@pytest.mark.parametrize("busy", [False, True])
async def test_lifetime_ends_after_the_server_was_killed(*, busy: bool) -> None:
    with new_home() as home:
        url, kept = f"{SANDBOXES}/box", f"{SANDBOXES}/kept"
        async with run_killable_server(home) as http:
            await fetch(http.put(url, json={"keep_alive": True}))
            await fetch(http.put(kept, json={"keep_alive": True}))
            if not busy:
                await fetch(http.post(f"{url}/sleep"))
            info = (await fetch(http.get(url))).body
            await fetch(http.put(url, json={"lifetime": time.time() - info["created_at"] + 2}))
        async with run_killable_server(home) as http:
            # It ends while the server starts, or soon after.
            await _wait_until_missing(http, url)
            found = (await fetch(http.get(SANDBOXES))).body["sandboxes"]
            assert [one["id"] for one in found] == ["kept"]
            assert len(os.listdir(f"{home}/boxes")) == 1
            await fetch(http.delete(kept))
        assert find_leftovers(home) == []


async def test_kill_within_the_end_of_a_lifetime_leaves_nothing() -> None:
    for line in range(1, 40, 6):
        with new_home() as home:
            url = f"{SANDBOXES}/box"
            async with run_killable_server(
                home, kill_at=line, since="_expire", traced=("engine/lifecycle.py",)
            ) as http:
                info = (await fetch(http.put(url, json={"keep_alive": True}))).body
                lifetime = time.time() - info["created_at"] + 0.3
                await fetch(http.put(url, json={"lifetime": lifetime}))
                with contextlib.suppress(aiohttp.ClientError):
                    await _wait_until_missing(http, url)
            async with run_killable_server(home) as http:
                await _wait_until_missing(http, url)
            assert find_leftovers(home) == []


async def _wait_until_missing(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(10):
        while (await fetch(http.get(url))).status != 404:
            await asyncio.sleep(0.05)
