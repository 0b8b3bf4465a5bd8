"""The background loop: calls from all kinds of threads, cancellation and closing."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import SandboxGone, Unsupported
from smokebox.sandbox import background_loop
from smokebox.sandbox.background_loop import BackgroundLoop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


async def thread_name() -> str:
    return threading.current_thread().name


class Endless:
    """Work that ends only when cancelled, and takes a moment to do so."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cleaned = threading.Event()

    async def __call__(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.cleaned.set()


def test_no_thread_before_the_first_call() -> None:
    before = threading.active_count()
    BackgroundLoop().close()
    assert threading.active_count() == before


def test_all_work_runs_on_one_thread(loop: BackgroundLoop) -> None:
    assert {loop.run(thread_name()) for _ in range(3)} == {"smokebox-loop"}


async def test_caller_with_a_running_loop_can_block_or_await(loop: BackgroundLoop) -> None:
    assert loop.run(thread_name()) == await loop.call(thread_name()) == "smokebox-loop"


def test_many_threads_share_the_loop(loop: BackgroundLoop) -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.append(loop.run(thread_name()))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == ["smokebox-loop"] * 20


def test_errors_propagate_unchanged(loop: BackgroundLoop) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        loop.run(fail())


async def test_cancelling_waits_until_the_work_has_ended(loop: BackgroundLoop) -> None:
    work = Endless()
    task = asyncio.create_task(loop.call(work()))
    await asyncio.to_thread(work.started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cleaned.is_set()


async def test_cancelling_at_once_leaves_the_loop_usable(loop: BackgroundLoop) -> None:
    for _ in range(50):
        task = asyncio.create_task(loop.call(thread_name()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await loop.call(thread_name()) == "smokebox-loop"


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Handle SIGINT as in a terminal: a process started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_interrupt_cancels_the_work(loop: BackgroundLoop) -> None:
    work = Endless()

    def interrupt() -> None:
        work.started.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert work.cleaned.is_set()


@pytest.mark.parametrize("moment", ["before it is submitted", "when it has begun"])
def test_interrupt_before_the_wait_cancels_the_work(
    loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    work = Endless()
    submit = background_loop._Job.submit

    def interrupted(job: background_loop._Job[None], target: asyncio.AbstractEventLoop) -> None:
        if moment == "when it has begun":
            submit(job, target)
            assert work.started.wait(10)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(background_loop._Job, "submit", interrupted)
        loop.run(work())
    assert work.started.is_set() == work.cleaned.is_set() == (moment == "when it has begun")
    assert loop.run(thread_name()) == "smokebox-loop"


def test_blocking_call_from_the_loop_itself_is_refused(loop: BackgroundLoop) -> None:
    async def nested() -> str:
        return loop.run(thread_name())

    with pytest.raises(Unsupported, match="Await the async method"):
        loop.run(nested())


def test_awaited_call_from_the_loop_itself_works(loop: BackgroundLoop) -> None:
    async def nested() -> str:
        return await loop.call(thread_name())

    assert loop.run(nested()) == "smokebox-loop"


def test_closing_ends_a_blocking_call_with_an_error(loop: BackgroundLoop) -> None:
    work = Endless()

    def close_when_started() -> None:
        work.started.wait()
        loop.close()

    threading.Thread(target=close_when_started).start()
    with pytest.raises(SandboxGone, match="closed while"):
        loop.run(work())
    assert work.cleaned.is_set()


async def test_closing_ends_an_awaited_call_with_an_error(loop: BackgroundLoop) -> None:
    work = Endless()
    task = asyncio.create_task(loop.call(work()))
    await asyncio.to_thread(work.started.wait)
    await asyncio.to_thread(loop.close)
    with pytest.raises(SandboxGone, match="closed while"):
        await task


def test_closed_loop_refuses_work(loop: BackgroundLoop) -> None:
    loop.run(thread_name())
    loop.close()
    loop.close()
    with pytest.raises(Unsupported, match="closed"):
        loop.run(thread_name())


def test_dropped_loop_ends_its_thread() -> None:
    loop = BackgroundLoop()
    loop.run(thread_name())
    thread = loop._thread
    reference = weakref.ref(loop)
    del loop
    gc.collect()
    assert reference() is None
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_closing_from_many_threads_at_once_leaves_no_call_hanging() -> None:
    for _ in range(20):
        loop = BackgroundLoop()
        ended = threading.Barrier(5)

        def use(loop: BackgroundLoop = loop, ended: threading.Barrier = ended) -> None:
            try:
                while True:
                    loop.run(thread_name())
            except (Unsupported, SandboxGone):
                ended.wait(10)

        for _ in range(4):
            threading.Thread(target=use).start()
        time.sleep(0.001)
        loop.close()
        ended.wait(10)
