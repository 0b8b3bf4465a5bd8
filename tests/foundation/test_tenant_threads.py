"""Threads for blocking calls of tenants."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from smokebox.foundation.loop_shares import LoopShares, run_in
from smokebox.foundation.tenant_threads import TENANT_THREADS, THREADS, TenantExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Blocking:
    """Calls that block until the end of a test."""

    def __init__(self) -> None:
        self.running = 0
        self.end = threading.Event()

    def __call__(self) -> str:
        self.running += 1
        assert self.end.wait(30)
        return "done"


@pytest.fixture
async def blocking() -> AsyncIterator[Blocking]:
    asyncio.get_running_loop().set_default_executor(TenantExecutor())
    blocking = Blocking()
    yield blocking
    blocking.end.set()


async def in_threads(tenant: str, function: Callable[[], object]) -> object:
    return await run_in(LoopShares().share(tenant), asyncio.to_thread(function))


async def wait_for_calls(blocking: Blocking, count: int) -> None:
    while blocking.running < count:
        await asyncio.sleep(0.01)


async def test_tenant_occupies_some_threads_only(blocking: Blocking) -> None:
    calls = [asyncio.create_task(in_threads("heavy", blocking)) for _ in range(3 * THREADS)]
    await wait_for_calls(blocking, TENANT_THREADS)
    assert await in_threads("other", lambda: "other") == "other"
    assert await in_threads("", lambda: "operator") == "operator"
    assert blocking.running == TENANT_THREADS
    blocking.end.set()
    assert await asyncio.gather(*calls) == ["done"] * 3 * THREADS


async def test_calls_that_are_cancelled_while_they_wait_do_not_run(blocking: Blocking) -> None:
    calls = [asyncio.create_task(in_threads("heavy", blocking)) for _ in range(TENANT_THREADS)]
    await wait_for_calls(blocking, TENANT_THREADS)
    ran = []
    waiting = asyncio.create_task(in_threads("heavy", lambda: ran.append("cancelled")))
    last = asyncio.create_task(in_threads("heavy", lambda: ran.append("last")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    blocking.end.set()
    await asyncio.gather(*calls, last)
    assert ran == ["last"]


async def test_errors_reach_the_caller(blocking: Blocking) -> None:
    def fail() -> None:
        raise KeyError("name")

    for _ in range(2 * TENANT_THREADS):
        with pytest.raises(KeyError, match="name"):
            await in_threads("tenant", fail)
