"""Builds that end early: failures to look into, timeouts, cancellation and a killed engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from building import BASE, build, context
from smokebox.engine.host import Host
from smokebox.engine.images.build.builds import BuildRequest
from smokebox.errors import BuildFailed, DeadlineExceeded, LimitReached, RegistryError
from smokebox.limits import Limits

TESTS = Path(__file__).parents[3]
SLOW = f"FROM {BASE}\nRUN echo done > /done\nRUN echo started; sleep 60 & sleep 60\n"

KILLED = """
import asyncio, sys
from building import build, build_base
from smokebox.engine.host import Host

async def main():
    async with await Host.open(sys.argv[1], pool=0) as host:
        await build_base(host)
        print("ready", flush=True)
        await build(host, sys.argv[2])

asyncio.run(main())
"""


def leftovers(host: Host) -> list[str]:
    """Return the directories of sandboxes that are left."""
    return os.listdir(os.path.join(host.home, "boxes"))


async def test_leaves_a_sandbox_to_look_into(based: Host) -> None:
    text = f"FROM {BASE}\nENV found=me\nWORKDIR /w\nRUN echo half > /half; exit 7\n"
    with pytest.raises(BuildFailed, match="smokebox sh build-") as caught:
        await build(based, text, keep=True)
    sandbox = based.sandbox(str(caught.value.sandbox))
    done = await sandbox.exec("cat /half; echo $found; pwd")
    assert done.stdout == "half\nme\n/w\n"
    await sandbox.destroy()


async def test_leaves_nothing_of_a_failed_command(based: Host) -> None:
    with pytest.raises(BuildFailed):
        await build(based, f"FROM {BASE}\nRUN echo half > /half; exit 7\n")
    assert leftovers(based) == []
    assert await based.list() == []


async def test_closing_the_stream_kills_the_build(based: Host) -> None:
    request = BuildRequest(dockerfile=SLOW, entries=await context(based, {}))
    events = based.builds.run(request)
    async for event in events:
        if event.kind == "output":
            break
    started = time.monotonic()
    await events.aclose()
    assert time.monotonic() - started < 5
    assert leftovers(based) == []
    again = await build(based, f"FROM {BASE}\nRUN echo done > /done\n")
    assert again.ran == []


async def test_cancelling_the_reader_kills_the_build(based: Host) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for event in based.builds.run(BuildRequest(dockerfile=SLOW)):
            if event.kind == "output":
                started.set()

    reading = asyncio.create_task(read())
    await started.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with asyncio.timeout(5):
        while leftovers(based):
            await asyncio.sleep(0.01)


async def test_stops_at_its_timeout(based: Host) -> None:
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.5 seconds"):
        await build(based, SLOW, timeout=0.5)
    assert leftovers(based) == []


async def test_a_failing_stage_ends_the_others(based: Host) -> None:
    text = f"""
    FROM {BASE} AS slow
    RUN sleep 60
    FROM {BASE} AS bad
    RUN exit 9
    FROM scratch
    COPY --from=slow / /
    COPY --from=bad / /
    """
    async with asyncio.timeout(15):
        with pytest.raises(BuildFailed, match="exit code 9"):
            await build(based, text)
    assert leftovers(based) == []


async def test_refuses_a_copy_above_the_disk_limit(based: Host) -> None:
    with pytest.raises(BuildFailed) as caught:
        await build(
            based,
            f"FROM {BASE}\nCOPY big /big",
            {"big": b"x" * 3_000_000},
            limits=Limits(disk="1MB"),
        )
    assert isinstance(caught.value.__cause__, LimitReached)


async def test_runs_commands_without_a_network(based: Host) -> None:
    built = await build(based, f"FROM {BASE}\nRUN cat /proc/net/route | wc -l")
    assert built.output.strip() == "1"


async def test_refuses_a_url_that_the_policy_does_not_allow(based: Host) -> None:
    with pytest.raises(BuildFailed, match=r"does not allow example\.com") as caught:
        await build(based, f"FROM {BASE}\nADD https://example.com/x /x")
    assert "allowed_hosts" in caught.value.hint


async def test_a_base_of_another_scope_is_looked_for_in_the_registry(based: Host) -> None:
    await build(based, f"FROM {BASE}\nENV a=1", names=("mine:1",), scope="a-")
    with pytest.raises(BuildFailed) as caught:
        await build(based, "FROM mine:1", scope="b-")
    assert isinstance(caught.value.__cause__, RegistryError)
    assert (await build(based, "FROM mine:1", scope="a-")).digest


async def test_a_killed_engine_leaves_nothing_and_keeps_finished_steps(tmp_path: Path) -> None:
    home = tmp_path / "home"
    engine = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(home), SLOW],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, *sys.path)))},
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"ready\n"
    boxes = home / "boxes"
    deadline = time.monotonic() + 15
    # The second RUN is the one that stays.
    while time.monotonic() < deadline:
        if any((box / "run").is_dir() for box in boxes.iterdir()):
            await asyncio.sleep(0.05)
            if steps(home) >= 3:
                break
        await asyncio.sleep(0.01)
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    engine.stdout.close()
    async with await Host.open(home, pool=0) as host:
        assert leftovers(host) == []
        again = await build(host, f"FROM {BASE}\nRUN echo done > /done\n")
        assert again.ran == []
        assert len(await host._context.record.build_steps()) == 2


def steps(home: Path) -> int:
    """Return the number of sandboxes that the running build has begun."""
    import sqlite3

    with sqlite3.connect(f"file:{home}/record.db?mode=ro", uri=True) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM build_steps")
    return int(count) + len(os.listdir(home / "boxes"))


async def test_a_failure_stays_the_error_if_no_sandbox_can_be_kept(based: Host) -> None:
    async def full(id: str, image: str) -> None:
        raise LimitReached("the quota sandboxes is used up.", hint="Destroy one.")

    based.builds._create_sandbox = full
    with pytest.raises(BuildFailed, match="exit code 7") as caught:
        await build(based, f"FROM {BASE}\nRUN echo seen; exit 7\n", keep=True)
    assert caught.value.hint == "No sandbox was kept: the quota sandboxes is used up. Destroy one."
    assert (caught.value.output, caught.value.sandbox) == ("seen\n", None)
