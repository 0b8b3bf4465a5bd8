"""`FifoLock`: order, cancellation, and use from several event loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from smokebox.sandbox.virtual.threads import FifoLock


async def test_lock_is_acquired_in_order() -> None:
    lock, inside, order = FifoLock(), 0, []

    async def use(n: int) -> None:
        nonlocal inside
        async with lock:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            order.append(n)
            inside -= 1

    async with asyncio.TaskGroup() as group:
        for n in range(20):
            group.create_task(use(n))
    assert order == list(range(20))


async def test_error_while_held_releases_the_lock() -> None:
    lock = FifoLock()
    with pytest.raises(LookupError):
        async with lock:
            raise LookupError
    async with lock:
        pass


async def test_cancelled_waiter_leaves_the_queue() -> None:
    lock = FifoLock()

    async def use() -> str:
        async with lock:
            return "done"

    async with lock:
        first, second = asyncio.create_task(use()), asyncio.create_task(use())
        await asyncio.sleep(0)
        first.cancel()
    assert await asyncio.wait_for(second, 5) == "done"


async def test_waiter_cancelled_after_being_woken_wakes_the_next() -> None:
    lock = FifoLock()

    async def use() -> str:
        async with lock:
            return "done"

    async with lock:
        first, second = asyncio.create_task(use()), asyncio.create_task(use())
        await asyncio.sleep(0)
    # The first waiter has been woken and has not run yet.
    first.cancel()
    assert await asyncio.wait_for(second, 5) == "done"


def test_one_lock_works_in_several_event_loops() -> None:
    lock, count = FifoLock(), 0

    async def use() -> None:
        nonlocal count
        for _ in range(50):
            async with lock:
                before = count
                await asyncio.sleep(0)
                count = before + 1

    users = [threading.Thread(target=lambda: asyncio.run(use())) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(15)
    assert count == 200


def test_waiter_of_a_closed_loop_does_not_block_others() -> None:
    lock = FifoLock()

    async def wait_for_lock() -> None:
        waiter = asyncio.ensure_future(lock.__aenter__())
        await asyncio.sleep(0)
        assert not waiter.done()

    async def hold() -> None:
        async with lock:
            await asyncio.to_thread(lambda: asyncio.run(wait_for_lock()))

    asyncio.run(hold())
    asyncio.run(asyncio.wait_for(lock.__aenter__(), 5))
