"""First come, first served, also over several event loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from smokebox.sandbox.virtual.fifo_lock import FifoLock


async def test_one_at_a_time_in_order() -> None:
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


async def test_an_error_inside_frees_it() -> None:
    lock = FifoLock()
    with pytest.raises(LookupError):
        async with lock:
            raise LookupError
    async with lock:
        pass


async def test_who_is_cancelled_while_waiting_leaves_the_queue() -> None:
    lock = FifoLock()

    async def visit() -> str:
        async with lock:
            return "been"

    async with lock:
        first, second = asyncio.create_task(visit()), asyncio.create_task(visit())
        await asyncio.sleep(0)
        first.cancel()
    assert await asyncio.wait_for(second, 5) == "been"


async def test_who_is_cancelled_when_called_hands_it_on() -> None:
    lock = FifoLock()

    async def visit() -> str:
        async with lock:
            return "been"

    async with lock:
        first, second = asyncio.create_task(visit()), asyncio.create_task(visit())
        await asyncio.sleep(0)
    # The first has been called, and has not run yet.
    first.cancel()
    assert await asyncio.wait_for(second, 5) == "been"


def test_it_serves_several_loops() -> None:
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


def test_a_loop_that_ended_with_someone_waiting_holds_nobody_up() -> None:
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
