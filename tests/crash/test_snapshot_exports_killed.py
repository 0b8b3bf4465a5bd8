"""SIGKILL of the server while it exports a snapshot to a bucket or imports one from there.

The next server has nothing that is incomplete, and the repeated request succeeds.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from crash.test_snapshots_killed import garbage, layers_in, run
from http_response import fetch
from killable_server import new_home, run_killable_server

if TYPE_CHECKING:
    from smokebox.testing import SeaweedServer

SANDBOX = "/api/sandboxes/box"
FILES = tuple(
    f"engine/{name}.py"
    for name in (
        "backups/archive_store",
        "images/chunk_pipe",
        "images/layer_folder",
        "images/layer_pack",
        "images/layer_store",
        "images/layer_unpack",
        "images/layer_writer",
        "snapshots/snapshot_archives",
    )
)
TREE = "mkdir -p d/e; for i in $(seq 30); do head -c 5000 /dev/urandom > d/$i; done; ln -s d l"
LIST = "find . -printf '%P %y %s %l\\n' | LC_ALL=C sort; md5sum $(find . -type f | LC_ALL=C sort)"
TRIES = int(os.environ.get("SMOKEBOX_CRASH_TRIES", "3"))
LOST = (aiohttp.ClientError, ConnectionError)
pytestmark = pytest.mark.timeout(120 + 30 * TRIES)


def lines(most: int) -> list[int]:
    """Return random line numbers, spread over all lines."""
    seed = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.randrange(1 << 30)))
    sys.stdout.write(f"SMOKEBOX_CRASH_SEED={seed}\n")
    rng = random.Random(seed)
    return [1 + int(most * (number + rng.random()) / TRIES) for number in range(TRIES)]


async def test_killed_export_and_import_are_repeated(
    seaweed: SeaweedServer, bucket_name: str
) -> None:
    env = {
        "BACKUPS": f"s3://{bucket_name}/snapshots",
        "AWS_ENDPOINT_URL": seaweed.endpoint,
        "AWS_ACCESS_KEY_ID": seaweed.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
        "AWS_REGION": seaweed.region,
    }
    with new_home() as home, new_home() as other:
        async with run_killable_server(home, env=env) as http:
            await fetch(http.put(SANDBOX, json={"keep_alive": True}))
            await run(http, TREE)
            expected = await run(http, LIST)
            id = (await fetch(http.post(f"{SANDBOX}/snapshots", json={}))).body["id"]
        for line in lines(1000):
            async with run_killable_server(
                home, kill_at=line, since="export", traced=FILES, env=env
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post(f"/api/snapshots/{id}/export"))
            async with run_killable_server(home, env=env) as http:
                assert (garbage(home), os.listdir(f"{home}/backups")) == ([], [])
        async with run_killable_server(home, env=env) as http:
            assert (await fetch(http.post(f"/api/snapshots/{id}/export"))).status == 200
        for line in lines(4000):
            async with run_killable_server(
                other, kill_at=line, since="load", traced=FILES, env=env
            ) as http:
                with contextlib.suppress(*LOST):
                    await fetch(http.post("/api/snapshots/import", json={"id": id}))
            async with run_killable_server(other, env=env) as http:
                assert (garbage(other), os.listdir(f"{other}/backups")) == ([], [])
                imported = await fetch(http.post("/api/snapshots/import", json={"id": id}))
                # Killed after it was recorded.
                assert imported.status in (201, 409), imported.body
                created = await fetch(http.put(SANDBOX, json={"snapshot": id}))
                assert created.status == 200, created.body
                assert await run(http, LIST) == expected
                await fetch(http.delete(SANDBOX))
                await fetch(http.delete(f"/api/snapshots/{id}"))
                assert layers_in(other) == []
