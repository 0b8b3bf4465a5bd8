"""Searches in logs by several tenants."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from http_response import fetch
from smokebox.server import log_search_worker
from smokebox.server.log_search import LogSearch
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path


async def test_searches_of_one_tenant_do_not_hold_up_those_of_another(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        assert server.url is not None
        async with (
            aiohttp.ClientSession(
                "http://localhost", connector=aiohttp.UnixConnector(server.socket)
            ) as http,
            aiohttp.ClientSession(server.url) as tenant,
        ):
            key = await fetch(http.post("/api/keys", json={"name": "slow", "prefix": "slow-"}))
            tenant.headers["authorization"] = f"Bearer {key.body['key']}"
            theirs, ours = "/api/sandboxes/slow-box", "/api/sandboxes/box"
            for client, box, line in ((tenant, theirs, "0" * 64), (http, ours, "ready")):
                await fetch(client.put(box, json={}))
                body = {"command": f"echo {line}; sleep 60", "id": "one"}
                await fetch(client.post(f"{box}/processes", json=body))
            path, slow = (
                f"{theirs}/processes/one/wait_for_log",
                {"pattern": "(0*)*x", "regex": True},
            )
            waiting = [asyncio.create_task(fetch(tenant.post(path, json=slow))) for _ in range(12)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            good = {"pattern": "re+ady", "regex": True}
            found = await fetch(http.post(f"{ours}/processes/one/wait_for_log", json=good))
            assert found.body["text"] == "ready"
            # Each of theirs takes a second of CPU time, one after the other.
            assert not all(one.done() for one in waiting)
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)


def test_worker_outlives_a_search_that_takes_too_long() -> None:
    requests = [
        {"pattern": "(0*)*x", "flags": 0, "lines": ["0" * 64]},
        {"pattern": "[", "flags": 0, "lines": [""]},
        {"pattern": "re+ady", "flags": 0, "lines": ["", "all ready"]},
    ]
    found = subprocess.run(
        [sys.executable, "-I", "-S", log_search_worker.__file__],
        input="".join(json.dumps(one) + "\n" for one in requests),
        capture_output=True,
        text=True,
        check=True,
    )
    slow, invalid, good = map(json.loads, found.stdout.splitlines())
    assert "takes too long" in slow["error"]
    assert "unterminated" in invalid["error"]
    assert (good["line"], good["span"]) == (1, [4, 9])


async def test_cancelled_search_leaves_its_worker_to_the_next() -> None:
    search = LogSearch()
    async with search._in_use("tenant"):
        assert (await search.search("tenant", "a", 0, ["a"])).line == 0
        (worker,) = search._idle
        slow = asyncio.create_task(search.search("tenant", "(0*)*x", 0, ["0" * 64]))
        while search._idle:
            await asyncio.sleep(0)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await search.search("tenant", "b", 0, ["ab"])).line == 0
        assert search._idle == [worker]
    await search.aclose()
    assert worker.returncode is not None
