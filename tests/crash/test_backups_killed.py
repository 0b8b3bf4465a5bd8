"""kill -9 of the server while it makes or restores a backup: all of it, or nothing.

It kills itself before a certain line, for lines all over the work. After each the next server
finds backups that are whole, and a directory that is either as it was or as it is restored.
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

BOX = "/api/sandboxes/box"
FILES = tuple(
    f"engine/backups/{name}.py"
    for name in ("archive", "archive_store", "backups", "restore", "sandbox_backups")
)
TREE = "mkdir -p d/e; for i in 1 2 3; do echo $i > d/$i; echo $i > d/e/$i; done; ln -s d l"
OTHER = "rm -rf *; mkdir -p new/er d; echo 4 > new/er/f; echo 5 > d/5; echo 6 > z"
LOOK = "find . -printf '%P %y %s %l\\n' | LC_ALL=C sort; cat $(find . -type f | LC_ALL=C sort)"
# How many lines are tried; SMOKEBOX_CRASH_TRIES=100 tries about every third.
TRIES = int(os.environ.get("SMOKEBOX_CRASH_TRIES", "3"))
pytestmark = pytest.mark.timeout(60 + 20 * TRIES)
LOST = (aiohttp.ClientError, ConnectionError)


def lines(most: int) -> Iterator[int]:
    """Some of the lines, spread over all of them, other ones each time."""
    seed = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.randrange(1 << 30)))
    sys.stdout.write(f"SMOKEBOX_CRASH_SEED={seed}\n")
    chance = random.Random(seed)
    step = most / TRIES
    for number in range(TRIES):
        yield 1 + int(step * number + chance.random() * step)


async def run(http: aiohttp.ClientSession, command: str) -> str:
    answer = await fetch(http.post(f"{BOX}/exec", json={"command": command}))
    assert answer.body["exit_code"] == 0, answer.body
    return str(answer.body["stdout"])


async def garbage(http: aiohttp.ClientSession, home: str) -> list[str]:
    """What is of no backup on the host, and what is of no user inside."""
    found = (await run(http, "find / -xdev -name '.smokebox-*'")).split()
    known = {one["id"] for one in (await fetch(http.get("/api/backups"))).body["backups"]}
    names = os.listdir(f"{home}/backups")
    with contextlib.closing(sqlite3.connect(f"{home}/record.db")) as record:
        rows = record.execute("SELECT staging FROM restores").fetchall()
    return [*found, *map(str, rows), *(one for one in names if one.partition(".")[0] not in known)]


async def test_a_backup_that_is_listed_is_whole_wherever_its_maker_was_killed() -> None:
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(BOX, json={"keep_alive": True}))
            await run(http, TREE)
            expected = await run(http, LOOK)
        reached = 0
        for number, line in enumerate(lines(330)):
            key = {"idempotency-key": f"key-{number}"}
            async with run_killable_server(
                home, kill_at=line, since="create", traced=FILES
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(f"{BOX}/backups", json={"freeze": True}, headers=key))
                    continue
                reached += 1
            async with run_killable_server(home) as http:
                assert await garbage(http, home) == []
                # Whoever asks again has one, whether or not there was one.
                made = await fetch(http.post(f"{BOX}/backups", json={"freeze": True}, headers=key))
                assert made.status == 201, made.body
                listed = (await fetch(http.get("/api/backups"))).body["backups"]
                assert [one["id"] for one in listed].count(made.body["id"]) == 1
                # It is not left standing still either.
                await run(http, "rm -rf *")
                where = f"{BOX}/backups/{made.body['id']}/restore"
                assert (await fetch(http.post(where, json={}))).status == 200
                assert await run(http, LOOK) == expected
        assert reached


async def test_a_directory_is_old_or_new_wherever_its_restorer_was_killed() -> None:
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(BOX, json={"keep_alive": True}))
            await run(http, TREE)
            new = await run(http, LOOK)
            backup = (await fetch(http.post(f"{BOX}/backups", json={}))).body["id"]
            await run(http, OTHER)
            old = await run(http, LOOK)
        where = f"{BOX}/backups/{backup}/restore"
        reached, seen = 0, set()
        for number, line in enumerate(lines(420)):
            async with run_killable_server(
                home, kill_at=line, since="restore", traced=FILES
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(where, json={}))
                    # There are fewer lines than that.
                    await run(http, OTHER)
                    continue
                reached += 1
            if number % 2:
                end_jail(home)
            async with run_killable_server(home) as http:
                found = await run(http, LOOK)
                assert found in (old, new)
                seen.add(found == new)
                assert await garbage(http, home) == []
                assert (await fetch(http.post(where, json={}))).status == 200
                assert await run(http, LOOK) == new
                await run(http, OTHER)
        assert reached
        assert TRIES < 20 or seen == {False, True}


def end_jail(home: str) -> None:
    """Kill the first process of the sandbox, so that it does not run when it is found."""
    with contextlib.closing(sqlite3.connect(f"{home}/record.db")) as record:
        [(jail,)] = record.execute("SELECT jail FROM sandboxes").fetchall()
    pid = json.loads(jail)["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    # What is frozen by cgroup v1 does not even die, until the next engine lets it.
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
