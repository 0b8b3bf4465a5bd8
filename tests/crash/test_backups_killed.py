"""SIGKILL of the server while it creates or restores a backup: all of it happens, or nothing.

The server kills itself before a certain line, for lines spread over the work. The next server
must find complete backups, and a directory that is either unchanged or restored.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import sys
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from http_response import fetch
from killable_server import new_home, run_killable_server

if TYPE_CHECKING:
    from collections.abc import Iterator

SANDBOX = "/api/sandboxes/box"
FILES = tuple(
    f"engine/backups/{name}.py"
    for name in ("archive", "archive_store", "backups", "restore", "sandbox_backups")
)
TREE = "mkdir -p d/e; for i in 1 2 3; do echo $i > d/$i; echo $i > d/e/$i; done; ln -s d l"
OTHER = "rm -rf *; mkdir -p new/er d; echo 4 > new/er/f; echo 5 > d/5; echo 6 > z"
LIST = "find . -printf '%P %y %s %l\\n' | LC_ALL=C sort; cat $(find . -type f | LC_ALL=C sort)"
# How many lines are tried; SMOKEBOX_CRASH_TRIES=100 tries about every third.
TRIES = int(os.environ.get("SMOKEBOX_CRASH_TRIES", "3"))
pytestmark = pytest.mark.timeout(60 + 20 * TRIES)
LOST = (aiohttp.ClientError, ConnectionError)


def lines(count: int) -> Iterator[int]:
    """Yield random line numbers, spread over all lines."""
    seed = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.randrange(1 << 30)))
    sys.stdout.write(f"SMOKEBOX_CRASH_SEED={seed}\n")
    rng = random.Random(seed)
    step = count / TRIES
    for number in range(TRIES):
        yield 1 + int(step * number + rng.random() * step)


async def run(http: aiohttp.ClientSession, command: str) -> str:
    response = await fetch(http.post(f"{SANDBOX}/exec", json={"command": command}))
    assert response.body["exit_code"] == 0, response.body
    return str(response.body["stdout"])


async def find_garbage(http: aiohttp.ClientSession, home: str) -> list[str]:
    """Return files on the host of no backup, and temporary files inside."""
    found = (await run(http, "find / -xdev -name '.smokebox-*'")).split()
    known = {one["id"] for one in (await fetch(http.get("/api/backups"))).body["backups"]}
    names = os.listdir(f"{home}/backups")
    with contextlib.closing(sqlite3.connect(f"{home}/record.db")) as record:
        rows = record.execute("SELECT staging FROM restores").fetchall()
    return [*found, *map(str, rows), *(one for one in names if one.partition(".")[0] not in known)]


async def test_listed_backup_is_complete_after_kill() -> None:
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={"keep_alive": True}))
            await run(http, TREE)
            expected = await run(http, LIST)
        reached = 0
        for number, line in enumerate(lines(330)):
            key = {"idempotency-key": f"key-{number}"}
            async with run_killable_server(
                home, kill_at=line, since="create", traced=FILES
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(f"{SANDBOX}/backups", json={"freeze": True}, headers=key))
                    continue
                reached += 1
            async with run_killable_server(home) as http:
                assert await find_garbage(http, home) == []
                # The retried request returns a backup, whether or not there was one.
                created = await fetch(
                    http.post(f"{SANDBOX}/backups", json={"freeze": True}, headers=key)
                )
                assert created.status == 201, created.body
                listed = (await fetch(http.get("/api/backups"))).body["backups"]
                assert [one["id"] for one in listed].count(created.body["id"]) == 1
                # The sandbox is not left frozen.
                await run(http, "rm -rf *")
                url = f"{SANDBOX}/backups/{created.body['id']}/restore"
                assert (await fetch(http.post(url, json={}))).status == 200
                assert await run(http, LIST) == expected
        assert reached


async def test_directory_is_unchanged_or_restored_after_kill() -> None:
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={"keep_alive": True}))
            await run(http, TREE)
            new = await run(http, LIST)
            backup = (await fetch(http.post(f"{SANDBOX}/backups", json={}))).body["id"]
            await run(http, OTHER)
            old = await run(http, LIST)
        url = f"{SANDBOX}/backups/{backup}/restore"
        reached, restored = 0, set()
        for number, line in enumerate(lines(420)):
            async with run_killable_server(
                home, kill_at=line, since="restore", traced=FILES
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(url, json={}))
                    # The work has fewer lines.
                    await run(http, OTHER)
                    continue
                reached += 1
            if number % 2:
                kill_jail(home)
            async with run_killable_server(home) as http:
                found = await run(http, LIST)
                assert found in (old, new)
                restored.add(found == new)
                assert await find_garbage(http, home) == []
                assert (await fetch(http.post(url, json={}))).status == 200
                assert await run(http, LIST) == new
                await run(http, OTHER)
        assert reached
        assert TRIES < 20 or restored == {False, True}


def kill_jail(home: str) -> None:
    """Kill the guest init, so that the next server does not find the sandbox running."""
    with contextlib.closing(sqlite3.connect(f"{home}/record.db")) as record:
        [(jail,)] = record.execute("SELECT jail FROM sandboxes").fetchall()
    pid = json.loads(jail)["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    # A process frozen by cgroup v1 does not die until the next engine thaws it.
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
