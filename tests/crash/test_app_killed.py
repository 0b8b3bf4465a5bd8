"""SIGKILL of an app under load: 20 conversations, 200 messages, and readers that reconnect.

Afterwards every accepted message has one outcome, the messages of a conversation are in order, and
no reader misses an event or sees one twice. SMOKEBOX_CRASH_ROUNDS is the number of kills, and
SMOKEBOX_CRASH_SEED selects their times.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from app.site import project
from smokebox.foundation.sse import EventReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORKLOAD = Path(__file__).with_name("app_workload.py")
SOURCE = Path(__file__).parents[2] / "src"
ROUNDS = min(50, int(os.environ.get("SMOKEBOX_CRASH_ROUNDS", "3")))
CONVERSATIONS, MESSAGES = 20, 10
AGENT = """
from smokebox import create_agent
from smokebox.agents.limits import Durability
from smokebox.testing import ScriptedModel, Turn, last_text

def respond(request):
    return Turn(f"echo: {last_text(request)} " + "and so on " * 20, pace=0.002)

agent = create_agent(
    model=ScriptedModel(then=respond), sandbox=None, durability=Durability(max_attempts=1000)
)
"""

pytestmark = pytest.mark.timeout(120 + 20 * ROUNDS)


@dataclass
class Load:
    """An app that is killed and restarted, with its writers and readers."""

    folder: Path
    port: int
    http: aiohttp.ClientSession
    accepted: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))
    seen: dict[str, list[int]] = field(default_factory=lambda: collections.defaultdict(list))
    ended: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def write(self, id: str) -> None:
        """Send the messages of a conversation, each with a key and until it is accepted."""
        for number in range(MESSAGES):
            while (found := await self._send(id, number)) is None:
                await asyncio.sleep(0.05)
            self.accepted[id].append(found)

    async def _send(self, id: str, number: int) -> str | None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self.http.post(
                f"{self.url}/agents/echo/{id}",
                json={"message": f"message {number}"},
                headers={"Idempotency-Key": f"{id}-{number}"},
            ) as response:
                if response.status == 202:
                    return str((await response.json())["submission_id"])
        return None

    async def read(self, id: str) -> None:
        """Follow a conversation until all its work has ended, resuming after the last event."""
        while self.ended[id] < MESSAGES:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await self._follow(id)
            await asyncio.sleep(0.05)

    async def _follow(self, id: str) -> None:
        seen, reader = self.seen[id], EventReader()
        headers = {"accept": "text/event-stream"}
        if seen:
            headers["last-event-id"] = str(seen[-1])
        async with self.http.get(f"{self.url}/agents/echo/{id}", headers=headers) as response:
            async for data in response.content.iter_any():
                for event in reader.feed(data):
                    seen.append(json.loads(event.data)["offset"])
                    self.ended[id] += event.name == "work_ended"
                if self.ended[id] >= MESSAGES:
                    return

    async def fetch(self, path: str) -> dict[str, object]:
        async with self.http.get(f"{self.url}{path}") as response:
            assert response.status == 200, await response.text()
            found: dict[str, object] = await response.json()
            return found


@contextlib.asynccontextmanager
async def running(load: Load) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the app in a child process, and kill it after the block."""
    with (load.folder / "errors").open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(WORKLOAD),
            str(load.folder),
            str(load.port),
            env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
            stderr=errors,
        )
    try:
        while True:
            assert process.returncode is None, (load.folder / "errors").read_text()
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await load.fetch("/health")
                break
            await asyncio.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_killed_app_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    rng = random.Random(os.environ.get("SMOKEBOX_CRASH_SEED", "1"))
    folder = project(tmp_path / "project", agents__echo=AGENT)
    (folder / "smokebox.toml").write_text("[app]\nconcurrency = 8\n")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        load = Load(folder, free_port(), http)
        ids = [f"c{number}" for number in range(CONVERSATIONS)]
        for id in ids:
            group.create_task(load.write(id))
            group.create_task(load.read(id))
        for _ in range(ROUNDS):
            async with running(load):
                most = sum(load.ended.values()) + rng.randint(3, 25)
                while sum(load.ended.values()) < min(most, CONVERSATIONS * MESSAGES - 5):
                    await asyncio.sleep(0.01)
        async with running(load):
            while any(load.ended[id] < MESSAGES for id in ids):
                await asyncio.sleep(0.05)
            for id in ids:
                await check(load, id)


async def check(load: Load, id: str) -> None:
    """Check one conversation after all its work has ended."""
    accepted = load.accepted[id]
    assert len(set(accepted)) == MESSAGES
    works = [await load.fetch(f"/submissions/{one}?wait=20") for one in accepted]
    assert [one["outcome"] for one in works] == ["completed"] * MESSAGES
    assert [text_of(one)[: len("echo: message 0")] for one in works] == [
        f"echo: message {number}" for number in range(MESSAGES)
    ]
    history = await load.fetch(f"/agents/echo/{id}")
    events = history["events"]
    assert isinstance(events, list)
    keys = {one["work_id"]: one["key"] for one in events if one["type"] == "work_accepted"}
    ends = [keys[one["work_id"]] for one in events if one["type"] == "work_ended"]
    assert ends == accepted
    assert load.seen[id] == list(range(1, len(load.seen[id]) + 1))
    assert len(load.seen[id]) == history["offset"]


def text_of(work: dict[str, object]) -> str:
    result = work["result"]
    assert isinstance(result, dict)
    return str(result["text"])
