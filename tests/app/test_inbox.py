"""The inbox: accepted work is done once, in order, by one process at a time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.app.inbox import AppInbox, SubmissionResult, WorkTarget
from smokebox.errors import Conflict, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ONE = WorkTarget(kind="agent", name="echo", id="one")
TWO = WorkTarget(kind="agent", name="echo", id="two")
RUN = WorkTarget(kind="workflow", name="add", id="r1")
DONE = SubmissionResult("completed", {"text": "done"})
CALLED_OFF = SubmissionResult("aborted")


@pytest_asyncio.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[AppInbox]:
    inbox = AppInbox(str(tmp_path / "inbox.db"))
    yield inbox
    await inbox.aclose()


@pytest_asyncio.fixture
async def other(inbox: AppInbox) -> AsyncIterator[AppInbox]:
    """The same file as another process opens it: locks belong to the open file, not the process."""
    other = AppInbox(inbox.path)
    yield other
    await other.aclose()


async def test_work_starts_in_order_of_acceptance(inbox: AppInbox) -> None:
    first, second = [await inbox.accept(ONE, n) for n in (1, 2)]
    [number] = await inbox.claim(5)
    for expected in (first, second):
        begun = await inbox.begin(number)
        assert begun is not None and begun.id == expected.id
        assert await inbox.end(begun.id, DONE)
    assert await inbox.begin(number) is None


async def test_target_is_claimed_by_one_process_at_a_time(inbox: AppInbox, other: AppInbox) -> None:
    await inbox.accept(ONE, 1)
    await inbox.accept(TWO, 2)
    mine, theirs = await inbox.claim(1), await other.claim(5)
    assert len(mine) == len(theirs) == 1 and mine != theirs
    assert list(await inbox.claim(5)) == []
    inbox.give_back(mine[0])
    assert await other.claim(5) == mine


async def test_abandoned_work_is_started_again(inbox: AppInbox, other: AppInbox) -> None:
    await inbox.accept(ONE, 1)
    [number] = await inbox.claim(1)
    begun = await inbox.begin(number)
    await inbox.aclose()
    [taken] = await other.claim(1)
    again = await other.begin(taken)
    assert begun is not None and again is not None
    assert (again.id, begun.attempts, again.attempts) == (begun.id, 0, 1)


async def test_outcome_is_final(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    assert await inbox.end(sent.id, DONE)
    assert not await inbox.end(sent.id, CALLED_OFF)
    assert not await inbox.abort(sent.id, CALLED_OFF)
    assert (await inbox.get(sent.id)).ending == DONE


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
    assert await inbox.open() == 20


async def test_waiter_sees_an_outcome_from_another_process(
    inbox: AppInbox, other: AppInbox
) -> None:
    sent = await inbox.accept(ONE, 1)
    waiting = asyncio.create_task(inbox.wait(sent.id))
    await other.end(sent.id, DONE)
    assert (await waiting).ending == DONE


async def test_aborted_waiting_work_ends_at_once(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    assert await inbox.abort(sent.id, CALLED_OFF)
    assert (await inbox.get(sent.id)).ending == CALLED_OFF
    assert list(await inbox.claim(5)) == []


async def test_running_work_is_notified_of_an_abort(inbox: AppInbox, other: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    [number] = await inbox.claim(1)
    await inbox.begin(number)
    assert await other.abort(sent.id, CALLED_OFF)
    assert await inbox.aborted() == {sent.id}
    assert (await inbox.get(sent.id)).ending is None


async def test_events_are_followed_until_the_submission_ends(
    inbox: AppInbox, other: AppInbox
) -> None:
    sent = await inbox.accept(RUN, 1)

    async def follow() -> list[bytes]:
        return [note.data async for note in other.follow(sent.id)]

    following = asyncio.create_task(follow())
    for n in range(1200):
        await inbox.note(sent.id, b'{"event":"log","n":%d}' % n)
    await inbox.end(sent.id, DONE)
    found = await following
    assert found[:1200] == [b'{"event":"log","n":%d}' % n for n in range(1200)]
    assert b'"ended"' in found[1200] and len(found) == 1201


async def test_old_work_is_deleted_and_its_target_with_the_last_of_it(inbox: AppInbox) -> None:
    old = await inbox.accept(ONE, 1)
    await inbox.end(old.id, DONE)
    run = await inbox.accept(RUN, 1)
    await inbox.end(run.id, DONE)
    moment = time.time()
    young = await inbox.accept(ONE, 2)
    async with inbox.expired(moment) as targets:
        assert targets == [RUN]
    await inbox.sweep(moment)
    for gone in (old, run):
        with pytest.raises(NotFound):
            await inbox.get(gone.id)
    assert await inbox.open_of(ONE) == [young.id]


async def test_unfinished_work_is_not_deleted(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    with pytest.raises(Conflict):
        await inbox.forget(ONE)
    await inbox.end(sent.id, DONE)
    assert await inbox.forget(ONE)
    assert not await inbox.forget(ONE)


async def test_closed_inbox_raises(inbox: AppInbox) -> None:
    sent = await inbox.accept(ONE, 1)
    waiting = asyncio.create_task(inbox.wait(sent.id))
    while not inbox._wakes._events:
        await asyncio.sleep(0)
    await inbox.aclose()
    assert (await waiting).state == "waiting"
    for ask in (inbox.get(sent.id), inbox.end(sent.id, DONE)):
        with pytest.raises(Conflict):
            await ask
