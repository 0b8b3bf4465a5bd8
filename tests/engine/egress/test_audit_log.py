"""The audit log: order, followers, bounded files and restarts."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from smokebox.engine.egress import audit_log as audit_log_module
from smokebox.engine.egress.audit_log import MAX_IN_MEMORY, AuditLog

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from smokebox.types import NetworkEvent


def add_event(audit_log: AuditLog, host: str = "a.example") -> NetworkEvent:
    return audit_log.add(
        verdict="forwarded", host=host, port=443, rule="internet", method="GET", status=200
    )


async def test_events_after_a_cursor_are_read_in_order() -> None:
    audit_log = AuditLog()
    events = [add_event(audit_log, f"h{number}") for number in range(5)]
    assert await audit_log.read() == events
    assert await audit_log.read(events[2].cursor) == events[3:]
    assert await audit_log.read(0, 2) == events[:2]
    assert await audit_log.read(audit_log.cursor) == []


async def test_reopened_log_continues_its_cursors(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    before = AuditLog()
    before.open(path)
    first = add_event(before)
    after = AuditLog()
    after.open(path)
    second = add_event(after)
    assert second.cursor == first.cursor + 1
    assert await after.read() == [first, second]
    before.close()
    after.close()


async def test_events_evicted_from_memory_are_read_from_the_file(tmp_path: Path) -> None:
    audit_log = AuditLog()
    audit_log.open(str(tmp_path / "log"))
    for _ in range(MAX_IN_MEMORY + 10):
        add_event(audit_log)
    found = await audit_log.read(limit=MAX_IN_MEMORY + 10)
    assert [event.cursor for event in found] == list(range(1, MAX_IN_MEMORY + 11))
    audit_log.close()


async def test_log_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log_module, "MAX_FILE_SIZE", 4000)
    audit_log = AuditLog()
    audit_log.open(str(tmp_path / "log"))
    for _ in range(200):
        add_event(audit_log)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) <= 2
    assert max(sizes) < 5000
    found = await audit_log.read()
    assert found[-1].cursor == 200
    audit_log.close()


async def test_followers_get_past_and_future_events() -> None:
    audit_log = AuditLog()
    add_event(audit_log, "before")
    seen: list[str] = []

    async def follow() -> None:
        async for event in audit_log.follow(0):
            seen.append(event.host)
            if event.host == "last":
                return

    async with asyncio.timeout(10):
        followers = [asyncio.create_task(follow()) for _ in range(2)]
        await asyncio.sleep(0)
        add_event(audit_log, "during")
        await asyncio.sleep(0)
        add_event(audit_log, "last")
        await asyncio.gather(*followers)
    assert sorted(seen) == sorted(["before", "during", "last"] * 2)


async def test_cancelled_follower_does_not_affect_others() -> None:
    audit_log = AuditLog()
    first, second = (asyncio.ensure_future(anext(aiter(audit_log.follow()))) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait({first})
    add_event(audit_log, "a.example")
    async with asyncio.timeout(10):
        assert (await second).host == "a.example"


async def test_long_values_are_truncated() -> None:
    event = add_event(AuditLog(), "x" * 100_000)
    assert len(event.host) < 2000


async def test_events_are_kept_in_memory_if_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit_log = AuditLog()
    audit_log.open(str(tmp_path / "missing" / "log"))
    event = add_event(audit_log)
    assert await audit_log.read() == [event]
    assert "cannot be written" in caplog.text


async def test_truncated_line_is_skipped_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "log"
    audit_log = AuditLog()
    audit_log.open(str(path))
    event = add_event(audit_log)
    audit_log.close()
    with open(path, "ab") as file:
        file.write(b'{"cursor": 2, "at"')
    reopened = AuditLog()
    reopened.open(str(path))
    assert await reopened.read() == [event]
    assert os.stat(path).st_mode & 0o077 == 0
