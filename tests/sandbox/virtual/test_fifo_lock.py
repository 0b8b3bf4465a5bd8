"""The lock is first come, first served, also across event loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from smokebox.sandbox.virtual.threads import FifoLock


async def test_holders_take_turns_in_order() -> None:
    lock, inside, order = FifoLock(), 0, []

    async def visit(n: int) -> None:
        nonlocal inside
        async with lock:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            order.append(n)
            inside -= 1

    async with asyncio.TaskGroup() as group:
        for n in range(20):
            group.create_task(visit(n))
    assert order == list(range(20))


async def test_an_error_while_held_releases_the_lock() -> None:
    lock = FifoLock()
    with pytest.raises(LookupError):
        async with lock:
            raise LookupError
    async with lock:
        pass


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    lock = FifoLock()

    async def visit() -> str:
        async with lock:
            return "been"

    async with lock:
        first, second = asyncio.create_task(visit()), asyncio.create_task(visit())
        await asyncio.sleep(0)
        first.cancel()
    assert await asyncio.wait_for(second, 5) == "been"


async def test_a_waiter_cancelled_on_its_turn_passes_the_lock_on() -> None:
    lock = FifoLock()

    async def visit() -> str:
        async with lock:
            return "been"

    async with lock:
        first, second = asyncio.create_task(visit()), asyncio.create_task(visit())
        await asyncio.sleep(0)
    # The first waiter has been woken and has not run yet.
    first.cancel()
    assert await asyncio.wait_for(second, 5) == "been"


def test_one_lock_works_in_several_event_loops() -> None:
    lock, count = FifoLock(), 0

    async def visit() -> None:
        nonlocal count
        for _ in range(50):
            async with lock:
                before = count
                await asyncio.sleep(0)
                count = before + 1

    visitors = [threading.Thread(target=lambda: asyncio.run(visit())) for _ in range(4)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(15)
    assert count == 200


def test_a_waiter_of_a_closed_loop_does_not_block_others() -> None:
    lock = FifoLock()

    async def wait_in_vain() -> None:
        waiting = asyncio.ensure_future(lock.__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()

    async def take_and_lose() -> None:
        async with lock:
            await asyncio.to_thread(lambda: asyncio.run(wait_in_vain()))

    asyncio.run(take_and_lose())
    asyncio.run(asyncio.wait_for(lock.__aenter__(), 5))
