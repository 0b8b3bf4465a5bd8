"""The inbox: accepted work is done once, in order, by one process at a time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.app.inbox import AppInbox, SubmissionOutcome, WorkTarget
from smokebox.errors import Conflict, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ONE = WorkTarget(kind="agent", name="echo", id="one")
TWO = WorkTarget(kind="agent", name="echo", id="two")
RUN = WorkTarget(kind="workflow", name="add", id="r1")
DONE = SubmissionOutcome("completed", {"text": "done"})
ABORTED = SubmissionOutcome("aborted")


@pytest_asyncio.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[AppInbox]:
    inbox = AppInbox(str(tmp_path / "inbox.db"))
    yield inbox
    await inbox.aclose()


@pytest_asyncio.fixture
async def other(inbox: AppInbox) -> AsyncIterator[AppInbox]:
    """The same file, opened as by another process: locks belong to the open file."""
    other = AppInbox(inbox.path)
    yield other
    await other.aclose()


async def test_work_starts_in_order_of_acceptance(inbox: AppInbox) -> None:
    first, second = [await inbox.accept(ONE, n) for n in (1, 2)]
    [number] = await inbox.claim(5)
    for expected in (first, second):
        started = await inbox.start_next(number)
        assert started is not None and started.id == expected.id
        assert await inbox.finish(started.id, DONE)
    assert await inbox.start_next(number) is None


async def test_target_is_claimed_by_one_process_at_a_time(inbox: AppInbox, other: AppInbox) -> None:
    await inbox.accept(ONE, 1)
    await inbox.accept(TWO, 2)
    mine, theirs = await inbox.claim(1), await other.claim(5)
    assert len(mine) == len(theirs) == 1 and mine != theirs
    assert list(await inbox.claim(5)) == []
    inbox.release(mine[0])
    assert await other.claim(5) == mine


async def test_abandoned_work_is_started_again(inbox: AppInbox, other: AppInbox) -> None:
    await inbox.accept(ONE, 1)
    [number] = await inbox.claim(1)
    started = await inbox.start_next(number)
    await inbox.aclose()
    [claimed] = await other.claim(1)
    again = await other.start_next(claimed)
    assert started is not None and again is not None
    assert (again.id, started.attempts, again.attempts) == (started.id, 0, 1)


async def test_outcome_is_final(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    assert await inbox.finish(sent.id, DONE)
    assert not await inbox.finish(sent.id, ABORTED)
    assert not await inbox.abort(sent.id, ABORTED)
    assert (await inbox.get(sent.id)).outcome == DONE


async def test_key_belongs_to_one_target_and_one_body(inbox: AppInbox) -> None:
    first = await inbox.accept(ONE, 1, key="k")
    assert (await inbox.accept(ONE, 1, key="k")).id == first.id
    assert (await inbox.accept(TWO, 2, key="k")).id != first.id
    with pytest.raises(Conflict):
        await inbox.accept(ONE, 2, key="k")


async def test_concurrent_accepts_with_one_key_create_one_submission(
    inbox: AppInbox, other: AppInbox
) -> None:
    sent = [one.accept(ONE, 1, key=f"k{n}") for n in range(20) for one in (inbox, other)]
    ids = [found.id for found in await asyncio.gather(*sent)]
    assert len(set(ids)) == 20
    assert await inbox.count_open() == 20


async def test_waiter_sees_an_outcome_from_another_process(
    inbox: AppInbox, other: AppInbox
) -> None:
    sent = await inbox.accept(ONE, 1)
    waiting = asyncio.create_task(inbox.wait(sent.id))
    await other.finish(sent.id, DONE)
    assert (await waiting).outcome == DONE


async def test_aborted_waiting_work_ends_at_once(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    assert await inbox.abort(sent.id, ABORTED)
    assert (await inbox.get(sent.id)).outcome == ABORTED
    assert list(await inbox.claim(5)) == []


async def test_running_work_is_notified_of_an_abort(inbox: AppInbox, other: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    [number] = await inbox.claim(1)
    await inbox.start_next(number)
    assert await other.abort(sent.id, ABORTED)
    assert await inbox.aborted_ids() == {sent.id}
    assert (await inbox.get(sent.id)).outcome is None


async def test_events_are_followed_until_the_submission_ends(
    inbox: AppInbox, other: AppInbox
) -> None:
    sent = await inbox.accept(RUN, 1)

    async def follow() -> list[bytes]:
        return [event.data async for event in other.follow(sent.id)]

    following = asyncio.create_task(follow())
    for n in range(1200):
        await inbox.add_event(sent.id, b'{"event":"log","n":%d}' % n)
    await inbox.finish(sent.id, DONE)
    found = await following
    assert found[:1200] == [b'{"event":"log","n":%d}' % n for n in range(1200)]
    assert b'"ended"' in found[1200] and len(found) == 1201


async def test_old_work_is_deleted_and_its_target_with_the_last_of_it(inbox: AppInbox) -> None:
    old = await inbox.accept(ONE, 1)
    await inbox.finish(old.id, DONE)
    run = await inbox.accept(RUN, 1)
    await inbox.finish(run.id, DONE)
    moment = time.time()
    young = await inbox.accept(ONE, 2)
    async with inbox.expired(moment) as targets:
        assert targets == [RUN]
    await inbox.delete_ended(moment)
    for deleted in (old, run):
        with pytest.raises(NotFound):
            await inbox.get(deleted.id)
    assert await inbox.open_ids(ONE) == [young.id]


async def test_unfinished_work_is_not_deleted(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    with pytest.raises(Conflict):
        await inbox.delete(ONE)
    await inbox.finish(sent.id, DONE)
    assert await inbox.delete(ONE)
    assert not await inbox.delete(ONE)


async def test_closed_inbox_raises(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    waiting = asyncio.create_task(inbox.wait(sent.id))
    while not inbox._wakes._events:
        await asyncio.sleep(0)
    await inbox.aclose()
    assert (await waiting).state == "waiting"
    for call in (inbox.get(sent.id), inbox.finish(sent.id, DONE)):
        with pytest.raises(Conflict):
            await call
