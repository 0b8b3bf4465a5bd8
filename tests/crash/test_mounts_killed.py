"""SIGKILL of an engine while it mounts a bucket, and while files are written to the mount."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from crash.engine_process import new_state_directory
from engine.leftovers import sandbox_pids
from engine.mounts.store import Store
from smokebox.engine.host import Host
from smokebox.sandbox.access import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from crash.engine_process import StateDirectory
    from smokebox.testing import SeaweedServer

SOURCE = Path(__file__).parents[2] / "src"
ROUNDS = int(os.environ.get("SMOKEBOX_CRASH_ROUNDS", "0")) // 10 or 8
# Mounts a bucket, then writes files and prints the name of each accepted one. With a number in
# `kill_at` it kills itself before that line of the mount code.
PROGRAM = """
import asyncio, json, os, sys
from smokebox.engine.host import Host
from smokebox.engine.mounts.request import parse_request
from smokebox.sandbox.access import Access

home, layers, bucket, access, turn, kill_at = sys.argv[1:]
lines = 0

def trace(frame, event, argument):
    return step if frame.f_code.co_filename.endswith(
        ("mounts/mounts.py", "mounts/helper.py")) else None

def step(frame, event, argument):
    global lines
    lines += event == "line"
    if lines >= int(kill_at):
        os.kill(os.getpid(), 9)
    return step

async def main():
    host = await Host.open(home, pool=0, images=layers)
    sandbox = host.sandbox("box")
    await sandbox.wake()
    if int(kill_at):
        sys.settrace(trace)
    request = parse_request(bucket, "/data", cwd="/", access=Access(**json.loads(access)),
                            private=True)
    await sandbox.mounts.mount(request)
    sys.settrace(None)
    for number in range(100000):
        name = f"{turn}-{number}"
        if (await sandbox.exec(["sh", "-c", "echo $0 > /data/$0", name])).exit_code == 0:
            print(name, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def directory() -> Iterator[StateDirectory]:
    with new_state_directory(unprivileged=False) as directory:
        yield directory


@pytest.fixture
def access(seaweed: SeaweedServer) -> Access:
    return Access(
        endpoint=seaweed.endpoint,
        region=seaweed.region,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
    )


def killed(
    directory: StateDirectory, bucket: str, access: Access, turn: int, *, at: int, after: int
) -> list[str]:
    """Run an engine until it is killed, and return the files that it accepted."""
    args = [
        directory.home,
        directory.layers,
        bucket,
        json.dumps(asdict(access)),
        str(turn),
        str(at),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    ) as engine:
        assert engine.stdout is not None
        accepted = []
        for line in engine.stdout:
            accepted.append(line.strip())
            if len(accepted) > after:
                engine.kill()
        engine.wait()
    return accepted


async def check(directory: StateDirectory, store: Store, accepted: list[str]) -> None:
    """Check that accepted files are in the bucket, and that listed mounts exist."""
    async with await Host.open(directory.home, pool=0, images=directory.layers) as host:
        sandbox = host.sandbox("box")
        result = await sandbox.exec("awk '$3 == \"fuse\" {print $2}' /proc/mounts; ls /data")
        listed = [one.path for one in await sandbox.mounts.list()]
        assert [path for path in result.stdout.split() if path.startswith("/")] == listed
        if listed:
            assert (await sandbox.exec("echo works > /data/probe")).exit_code == 0
        for name in accepted:
            assert store[name] == f"{name}\n".encode()
        await sandbox.sleep()
    async with asyncio.timeout(10):
        while list(sandbox_pids(directory.home)):
            await asyncio.sleep(0.05)


@pytest.mark.timeout(60 + ROUNDS * 10)
async def test_accepted_files_are_in_the_bucket(
    directory: StateDirectory, bucket_name: str, access: Access
) -> None:
    store = Store.of(bucket_name, access)
    accepted: list[str] = []
    rng = random.Random(7)
    for turn in range(ROUNDS):
        # Half of them during the mount, which takes about 300 lines.
        at = rng.randrange(1, 320) if turn % 2 else 0
        after = rng.randrange(20)
        accepted += await asyncio.to_thread(
            killed, directory, bucket_name, access, turn, at=at, after=after
        )
        await check(directory, store, accepted)
    assert accepted
