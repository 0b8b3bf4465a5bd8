"""The audit log: in order, bounded, and there again after a restart."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from smokebox.engine.egress import audit_log as module
from smokebox.engine.egress.audit_log import MAX_IN_MEMORY, AuditLog

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from smokebox.types import NetworkEvent


def note(audit_log: AuditLog, host: str = "a.example") -> NetworkEvent:
    return audit_log.add(
        verdict="forwarded", host=host, port=443, rule="internet", method="GET", status=200
    )


async def test_what_came_after_a_cursor_is_read_in_order() -> None:
    audit_log = AuditLog()
    events = [note(audit_log, f"h{number}") for number in range(5)]
    assert await audit_log.read() == events
    assert await audit_log.read(events[2].cursor) == events[3:]
    assert await audit_log.read(0, 2) == events[:2]
    assert await audit_log.read(audit_log.cursor) == []


async def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    before = AuditLog()
    before.open(path)
    first = note(before)
    after = AuditLog()
    after.open(path)
    second = note(after)
    assert second.cursor == first.cursor + 1
    assert await after.read() == [first, second]
    before.close()
    after.close()


async def test_what_memory_has_forgotten_is_read_from_the_file(tmp_path: Path) -> None:
    audit_log = AuditLog()
    audit_log.open(str(tmp_path / "log"))
    for _ in range(MAX_IN_MEMORY + 10):
        note(audit_log)
    found = await audit_log.read(limit=MAX_IN_MEMORY + 10)
    assert [event.cursor for event in found] == list(range(1, MAX_IN_MEMORY + 11))
    audit_log.close()


async def test_the_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_SIZE", 4000)
    audit_log = AuditLog()
    audit_log.open(str(tmp_path / "log"))
    for _ in range(200):
        note(audit_log)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) <= 2
    assert max(sizes) < 5000
    found = await audit_log.read()
    assert found[-1].cursor == 200
    audit_log.close()


async def test_who_follows_gets_what_was_and_what_comes() -> None:
    audit_log = AuditLog()
    note(audit_log, "before")
    seen: list[str] = []

    async def follow() -> None:
        async for event in audit_log.follow(0):
            seen.append(event.host)
            if event.host == "last":
                return

    async with asyncio.timeout(10):
        following = [asyncio.create_task(follow()) for _ in range(2)]
        await asyncio.sleep(0)
        note(audit_log, "then")
        await asyncio.sleep(0)
        note(audit_log, "last")
        await asyncio.gather(*following)
    assert sorted(seen) == sorted(["before", "then", "last"] * 2)


async def test_one_who_stops_following_disturbs_no_other() -> None:
    audit_log = AuditLog()
    first, second = (asyncio.ensure_future(anext(aiter(audit_log.follow()))) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait({first})
    note(audit_log, "for the other")
    async with asyncio.timeout(10):
        assert (await second).host == "for the other"


async def test_long_words_of_a_sandbox_are_cut() -> None:
    event = note(AuditLog(), "x" * 100_000)
    assert len(event.host) < 2000


async def test_a_file_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit_log = AuditLog()
    audit_log.open(str(tmp_path / "nowhere" / "log"))
    event = note(audit_log)
    assert await audit_log.read() == [event]
    assert "cannot be written" in caplog.text


async def test_a_line_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    audit_log = AuditLog()
    audit_log.open(str(path))
    event = note(audit_log)
    audit_log.close()
    with open(path, "ab") as file:
        file.write(b'{"cursor": 2, "at"')
    again = AuditLog()
    again.open(str(path))
    assert await again.read() == [event]
    assert os.stat(path).st_mode & 0o077 == 0
