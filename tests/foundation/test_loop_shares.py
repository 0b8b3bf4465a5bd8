"""Shares of an event loop: who waits, and who does not."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from smokebox.foundation.loop_shares import (
    LoopShares,
    create_task,
    current_tenant,
    pause,
    run_in,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.foundation.loop_shares import LoopShare

# Several ticks.
TICKS = 0.03


@pytest.fixture
async def shares() -> LoopShares:
    return LoopShares()


@pytest.fixture
async def task_factory() -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(create_task)
    yield
    loop.set_task_factory(None)


@contextlib.asynccontextmanager
async def working(shares: LoopShares, tenant: str) -> AsyncIterator[None]:
    """Let a tenant use the loop a little all the time."""

    async def work() -> None:
        while True:
            share = shares.share(tenant)
            if share is not None:
                share.charge(1e-8)
            await asyncio.sleep(0)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()


async def busy(shares: LoopShares, tenant: str) -> LoopShare:
    """Return the share of a tenant that has just used the loop for a long time."""
    share = shares.share(tenant)
    assert share is not None
    share.charge(10.0)
    await asyncio.sleep(TICKS)
    return share


@pytest.mark.parametrize("other", ["tenant", ""], ids=["tenant", "operator"])
async def test_tenant_that_keeps_the_loop_busy_waits_for_others(
    shares: LoopShares, other: str
) -> None:
    async with working(shares, other):
        heavy = await busy(shares, "heavy")
        waiting = asyncio.create_task(heavy.turn())
        await asyncio.sleep(TICKS)
        assert not waiting.done()
    await waiting


async def test_tenant_that_waits_has_its_part_of_the_time(shares: LoopShares) -> None:
    async with working(shares, "other"):
        heavy = await busy(shares, "heavy")
        await heavy.turn()


async def test_single_tenant_never_waits(shares: LoopShares) -> None:
    heavy = await busy(shares, "heavy")
    async with asyncio.timeout(0):
        await heavy.turn()


async def test_tenants_that_use_little_do_not_wait(shares: LoopShares) -> None:
    found = [shares.share(f"tenant{number}") for number in range(20)]
    for share in found:
        assert share is not None
        share.charge(0.0001)
    await asyncio.sleep(TICKS)
    assert not any(share.limited for share in found if share is not None)


async def test_waiting_that_is_cancelled_does_not_hold_up_the_next(shares: LoopShares) -> None:
    async with working(shares, "other"):
        heavy = await busy(shares, "heavy")
        first, second = asyncio.create_task(heavy.turn()), asyncio.create_task(heavy.turn())
        await asyncio.sleep(0)
        first.cancel()
        await second
    assert first.cancelled()


async def test_work_is_cancelled_while_it_waits_to_start(shares: LoopShares) -> None:
    started = False

    async def work() -> None:
        nonlocal started
        started = True

    async with working(shares, "other"):
        heavy = await busy(shares, "heavy")
        task = asyncio.create_task(run_in(heavy, work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not started


async def test_tasks_of_a_tenant_are_measured(shares: LoopShares, task_factory: None) -> None:
    async def child() -> str:
        await pause()
        return current_tenant()

    async def work() -> str:
        return await asyncio.create_task(child())

    share = shares.share("tenant")
    assert share is not None
    assert await asyncio.create_task(run_in(share, work())) == "tenant"
    assert share.used > 0
    assert current_tenant() == ""


async def test_work_of_the_operator_in_a_task_of_a_tenant_is_not_of_the_tenant(
    shares: LoopShares,
) -> None:
    async def tenant() -> str:
        return current_tenant()

    async def work() -> list[str]:
        return [await tenant(), await run_in(shares.share(""), tenant())]

    assert await run_in(shares.share("tenant"), work()) == ["tenant", ""]


async def test_errors_and_cancellation_pass_through(shares: LoopShares, task_factory: None) -> None:
    async def fail() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise KeyError("cleaned up") from None

    async def work() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(KeyError, match="cleaned up"):
        await run_in(shares.share("tenant"), work())
