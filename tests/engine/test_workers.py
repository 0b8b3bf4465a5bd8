"""Threads for file work: what failed work leaves, and long work of one of several tenants."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING

from smokebox.engine.workers import Job, Workers, checkpoint
from smokebox.foundation.loop_shares import LoopShares, run_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest


class Piece:
    """Something large that failing work has in hand."""


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_failed_work_frees_what_it_had_in_hand(workers: Workers) -> None:
    pieces: list[weakref.ref[Piece]] = []

    def fail() -> None:
        piece = Piece()
        pieces.append(weakref.ref(piece))
        raise KeyError("no room")

    async def run() -> None:
        with contextlib.suppress(KeyError):
            await workers.run(Job(), fail)

    with no_garbage_collection():
        for _ in range(3):
            await run()
        # The thread drops its reference to the last call after the result has arrived.
        while pieces[-1]() is not None:
            await asyncio.sleep(0.01)
        assert [piece() for piece in pieces] == [None, None, None]


async def test_long_work_of_a_tenant_has_one_thread_while_others_work(workers: Workers) -> None:
    """Threads that make many system calls keep the event loop from the interpreter."""
    shares, running, most = LoopShares(), 0, 0
    guard = threading.Lock()

    def walk() -> None:
        nonlocal running, most
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            checkpoint()
        for _ in range(20):
            checkpoint()
            with guard:
                running += 1
                most = max(most, running)
            time.sleep(0.002)
            with guard:
                running -= 1

    async def work(tenant: str) -> None:
        await run_in(shares.share(tenant), workers.run(Job(), walk))

    # The operator uses the event loop too.
    assert shares.share("") is None
    await asyncio.gather(*(work("tenant") for _ in range(4)))
    assert most == 1


async def test_work_that_waits_in_its_turn_does_not_hold_up_the_others(workers: Workers) -> None:
    """It may wait for a lock that the others have, or for a peer that sends nothing."""
    shares, waits, end = LoopShares(), threading.Event(), threading.Event()

    def walk(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            checkpoint()

    def wait_in_turn() -> None:
        walk(0.02)
        waits.set()
        assert end.wait(30)

    async def work(function: Callable[[], None]) -> None:
        await run_in(shares.share("tenant"), workers.run(Job(), function))

    assert shares.share("") is None
    waiting = asyncio.create_task(work(wait_in_turn))
    await asyncio.to_thread(waits.wait)
    try:
        async with asyncio.timeout(10):
            await work(lambda: walk(0.05))
    finally:
        end.set()
        await waiting


async def test_long_work_of_a_single_tenant_does_not_rest(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)

    def walk() -> None:
        until = time.monotonic() + 0.03
        while time.monotonic() < until:
            checkpoint()

    await run_in(LoopShares().share("tenant"), workers.run(Job(), walk))
    assert not slept
