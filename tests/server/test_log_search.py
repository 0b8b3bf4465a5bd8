"""Searches in logs by several tenants."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp

from http_response import fetch
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
