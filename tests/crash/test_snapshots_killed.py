"""SIGKILL of the server while it makes and restores snapshots, and while programs write.

Each acknowledged snapshot must hold a state of the sandbox from between its request and its
response. A restore happens as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import sys

import aiohttp
import pytest

from http_response import fetch
from killable_server import new_home, run_killable_server

SANDBOX = "/api/sandboxes/box"
FILES = tuple(
    f"engine/{name}.py"
    for name in (
        "images/layer_folder",
        "images/layer_store",
        "snapshots/capture",
        "snapshots/capture_job",
        "snapshots/checkpoints",
        "snapshots/delta",
        "snapshots/layer_merge",
        "snapshots/sandbox_snapshots",
        "snapshots/snapshots",
        "snapshots/tree_copier",
        "snapshots/tree_index",
        "snapshots/tree_watch",
    )
)
SNAPSHOTS = int(os.environ.get("SMOKEBOX_CRASH_SNAPSHOTS", "60"))
KILLS = 5
TRIES = int(os.environ.get("SMOKEBOX_CRASH_TRIES", "3"))
LOST = (aiohttp.ClientError, ConnectionError)
pytestmark = pytest.mark.timeout(120 + 2 * SNAPSHOTS + 20 * TRIES)

# Appends the hash of the line before and its number, and now and then renames a file over another.
WRITER = """
import hashlib, os, time
last, n = "", 0
with open("chain", "w") as chain:
    while True:
        last = hashlib.sha256(f"{last}{n}".encode()).hexdigest()
        chain.write(f"{last}\\n")
        chain.flush()
        n += 1
        if n % 5 == 0:
            with open("next", "w") as file:
                file.write(last)
            os.rename("next", "last")
        time.sleep(0.003)
"""
# Prints the length of the chain if it is whole, and if `last` is one of its hashes.
CHECK = """
import hashlib
lines = open("chain").read().split("\\n")
last = ""
for n, line in enumerate(lines[:-1]):
    last = hashlib.sha256(f"{last}{n}".encode()).hexdigest()
    assert line == last, n
assert not lines[-1] or len(lines) > 1
assert open("last").read() in lines
print(len(lines) - 1)
"""
TREE = "mkdir -p d/e; for i in 1 2 3; do echo $i > d/$i; echo $i > d/e/$i; done; ln -s d l"
OTHER = "rm -rf *; mkdir -p new/er d; echo 4 > new/er/f; echo 5 > d/5; echo 6 > z"
LIST = "find . -printf '%P %y %s %l\\n' | LC_ALL=C sort; cat $(find . -type f | LC_ALL=C sort)"


def seeded() -> random.Random:
    """Return random numbers whose seed a failure shows."""
    seed = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.randrange(1 << 30)))
    sys.stdout.write(f"SMOKEBOX_CRASH_SEED={seed}\n")
    return random.Random(seed)


async def run(http: aiohttp.ClientSession, command: str, sandbox: str = SANDBOX) -> str:
    response = await fetch(http.post(f"{sandbox}/exec", json={"command": command}))
    assert response.body["exit_code"] == 0, response.body
    return str(response.body["stdout"])


def garbage(home: str) -> list[str]:
    """Return layers and rows that belong to no snapshot."""
    with contextlib.closing(sqlite3.connect(f"{home}/record.db")) as record:
        known = {id for (id,) in record.execute("SELECT id FROM snapshot_layers")}
        making = record.execute("SELECT id FROM snapshots WHERE status != 'ready'").fetchall()
    return [*map(str, making), *(name for name in layers_in(home) if name not in known)]


def layers_in(home: str) -> list[str]:
    """Return the layers in the store, complete or not."""
    path = f"{home}/images/layers"
    names = os.listdir(path) if os.path.isdir(path) else []
    return [name for name in names if name not in (".users", ".lock")]


async def test_acknowledged_snapshots_hold_the_state_of_their_moment() -> None:
    rng = seeded()
    acknowledged: dict[str, int] = {}
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={"keep_alive": True}))
            await fetch(http.put(f"{SANDBOX}/files?path=w.py", data=WRITER.encode()))
            await fetch(http.put(f"{SANDBOX}/files?path=/check.py", data=CHECK.encode()))
            await run(http, "for i in $(seq 50); do head -c 4096 /dev/urandom > f$i; done")
            # So many that they are watched.
            await run(http, "mkdir many; cd many; for i in $(seq 600); do echo $i > $i; done")
            start = {"command": ["python3", "w.py"]}
            await fetch(http.post(f"{SANDBOX}/processes", json=start))
            await run(http, "until [ -e last ]; do sleep 0.01; done")
        for kill in range(KILLS + 1):
            line = rng.randrange(1, 4000) if kill < KILLS else 0
            async with run_killable_server(
                home, kill_at=line, since="create", traced=FILES
            ) as http:
                with contextlib.suppress(*LOST):
                    while len(acknowledged) < SNAPSHOTS * (kill + 1) / (KILLS + 1):
                        await take_snapshot(http, rng, acknowledged)
        async with run_killable_server(home) as http:
            assert garbage(home) == []
            await fetch(http.delete(SANDBOX))
            listed = (await fetch(http.get("/api/snapshots"))).body["snapshots"]
            assert acknowledged.keys() <= {one["id"] for one in listed}
            for id, length in acknowledged.items():
                await check_chain(http, id, length)
            for one in listed:
                await fetch(http.delete(f"/api/snapshots/{one['id']}"))
            assert layers_in(home) == []


async def take_snapshot(
    http: aiohttp.ClientSession, rng: random.Random, acknowledged: dict[str, int]
) -> None:
    length = int((await run(http, "wc -l < chain")).strip())
    await run(http, f"head -c 4096 /dev/urandom > f{rng.randrange(1, 51)}")
    made = await fetch(http.post(f"{SANDBOX}/snapshots", json={}))
    assert made.status == 201, made.body
    acknowledged[made.body["id"]] = length


async def check_chain(http: aiohttp.ClientSession, snapshot: str, length: int) -> None:
    created = await fetch(http.put("/api/sandboxes/check", json={"snapshot": snapshot}))
    assert created.status == 200, created.body
    found = await run(http, "python3 /check.py", "/api/sandboxes/check")
    assert int(found) >= length, (snapshot, found, length)
    await fetch(http.delete("/api/sandboxes/check"))


async def test_files_are_unchanged_or_restored_after_kill() -> None:
    rng = seeded()
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={"keep_alive": True}))
            await run(http, TREE)
            new = await run(http, LIST)
            snapshot = (await fetch(http.post(f"{SANDBOX}/snapshots", json={}))).body["id"]
            await run(http, OTHER)
            old = await run(http, LIST)
        url = f"{SANDBOX}/snapshots/{snapshot}/restore"
        for _ in range(TRIES):
            line = rng.randrange(1, 60)
            async with run_killable_server(
                home, kill_at=line, since="restore", traced=FILES
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(url, json={}))
            async with run_killable_server(home) as http:
                assert await run(http, LIST) in (old, new)
                assert (await fetch(http.post(url, json={}))).status == 200
                assert await run(http, LIST) == new
                assert garbage(home) == []
                await run(http, OTHER)


async def test_files_that_a_fork_takes_without_a_copy_are_kept_after_kill() -> None:
    """Every kill is of the first fork of a sleeping sandbox, whose files are moved."""
    rng = seeded()
    for number in range(2 * TRIES):
        with new_home() as home:
            async with run_killable_server(home) as http:
                await fetch(http.put(SANDBOX, json={"keep_alive": True}))
                await run(http, TREE)
                tree = await run(http, LIST)
                await fetch(http.post(f"{SANDBOX}/sleep"))
            line = rng.randrange(1, 500)
            async with run_killable_server(home, kill_at=line, since="fork", traced=FILES) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(f"{SANDBOX}/fork", json={"ids": ["fork"]}))
            async with run_killable_server(home) as http:
                if number % 2:
                    await fetch(http.delete("/api/sandboxes/fork"))
                else:
                    await fetch(http.post(f"{SANDBOX}/fork", json={"ids": ["other"]}))
                    assert await run(http, LIST, "/api/sandboxes/other") == tree
                assert await run(http, LIST) == tree
                assert garbage(home) == []


async def test_forks_are_all_or_none_after_kill() -> None:
    rng = seeded()
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={"keep_alive": True}))
            await run(http, TREE)
        for number in range(TRIES):
            line = rng.randrange(1, 1200)
            ids = [f"fork-{number}-{one}" for one in range(3)]
            async with run_killable_server(home, kill_at=line, since="fork", traced=FILES) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(f"{SANDBOX}/fork", json={"ids": ids}))
            async with run_killable_server(home) as http:
                found = (await fetch(http.get("/api/sandboxes?prefix=fork"))).body["sandboxes"]
                assert len(found) in (0, 3)
                for one in found:
                    await run(http, "cat d/e/3", f"/api/sandboxes/{one['id']}")
                    await fetch(http.delete(f"/api/sandboxes/{one['id']}"))
                # It is not left frozen.
                await run(http, f"echo {number} >> d/1")


async def test_a_checkpoint_is_whole_or_not_there_after_kill() -> None:
    rng = seeded()
    for _ in range(TRIES):
        with new_home() as home:
            async with run_killable_server(
                home, kill_at=rng.randrange(1, 1500), since="checkpoint", traced=FILES
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.put(SANDBOX, json={"keep_alive": True, "checkpoints": 1}))
                    await fetch(http.put(f"{SANDBOX}/files?path=w.py", data=WRITER.encode()))
                    await fetch(http.put(f"{SANDBOX}/files?path=/check.py", data=CHECK.encode()))
                    start = {"command": ["python3", "w.py"]}
                    await fetch(http.post(f"{SANDBOX}/processes", json=start))
                    async with asyncio.timeout(30):
                        while len(await listed(http)) < 4:
                            await asyncio.sleep(0.1)
            async with run_killable_server(home) as http:
                assert garbage(home) == []
                for one in await listed(http):
                    assert one["origin"] == "interval"
                    created = await fetch(
                        http.put("/api/sandboxes/check", json={"snapshot": one["id"]})
                    )
                    assert created.status == 200
                    check = "[ ! -e last ] || python3 /check.py"
                    await run(http, check, "/api/sandboxes/check")
                    await fetch(http.delete("/api/sandboxes/check"))


async def listed(http: aiohttp.ClientSession) -> list[dict[str, str]]:
    """Return all snapshots."""
    body = (await fetch(http.get("/api/snapshots"))).body
    found: list[dict[str, str]] = body["snapshots"]
    return found
