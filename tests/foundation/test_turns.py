"""Turns of an event loop: a party with many steps does not delay others, and nothing is lost."""

from __future__ import annotations

import asyncio
import time

import pytest

from smokebox.foundation.turns import current_party, start_in_turns, turns

STEP = 0.002


async def work(steps: int, order: list[str], name: str) -> None:
    """Take the loop for a while in each of several steps."""
    for _ in range(steps):
        until = time.perf_counter() + STEP
        while time.perf_counter() < until:
            pass
        order.append(name)
        await asyncio.sleep(0)


async def test_party_with_many_tasks_does_not_delay_another() -> None:
    order: list[str] = []
    crowd = [asyncio.create_task(turns().run("crowd", work(5, order, "crowd"))) for _ in range(40)]
    await asyncio.sleep(20 * STEP)
    before = len(order)
    await turns().run("single", work(5, order, "single"))
    # Without turns, each of its steps would wait for one of each of 40 tasks.
    between = order[before:].count("crowd")
    assert between <= 25
    await asyncio.gather(*crowd)
    assert (order.count("crowd"), order.count("single")) == (200, 5)


async def test_parties_that_wait_get_the_same_time() -> None:
    order: list[str] = []
    async with asyncio.TaskGroup() as group:
        for name, tasks in (("few", 2), ("many", 20)):
            for _ in range(tasks):
                group.create_task(turns().run(name, work(60 // tasks, order, name)))
    # Both have 60 steps, which end at about the same time.
    half = order[:60]
    assert 20 <= half.count("few") <= 40


async def test_value_and_error_of_the_work_are_those_of_the_run() -> None:
    async def value() -> int:
        await asyncio.sleep(0)
        return 42

    async def error() -> None:
        await asyncio.sleep(0)
        raise KeyError("one")

    assert await turns().run("party", value()) == 42
    with pytest.raises(KeyError):
        await turns().run("party", error())


async def test_timeout_within_the_work_ends_only_what_it_wraps() -> None:
    async def limited() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timed out"
        return "ended"

    assert await turns().run("party", limited()) == "timed out"


async def test_cancelling_reaches_work_that_waits_for_its_turn() -> None:
    order: list[str] = []
    cancelled: list[int] = []

    async def victim(number: int) -> None:
        try:
            await work(1000, order, "step")
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    tasks = [asyncio.create_task(turns().run("party", victim(one))) for one in range(20)]
    await asyncio.sleep(20 * STEP * 3)
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=5)
    assert len(done) == 20
    assert all(task.cancelled() for task in tasks)
    started = time.perf_counter()
    await turns().run("party", work(1, order, "after"))
    assert time.perf_counter() - started < 1


async def test_task_belongs_to_the_party_of_its_context() -> None:
    async def party() -> str:
        return current_party.get()

    async def outer() -> str:
        return await start_in_turns(party())

    assert await turns().run("tenant", outer()) == "tenant"


async def test_task_that_is_cancelled_before_its_first_step_warns_of_nothing() -> None:
    async def outer() -> None:
        start_in_turns(work(1, [], "never")).cancel()
        await asyncio.sleep(0)

    await turns().run("tenant", outer())
