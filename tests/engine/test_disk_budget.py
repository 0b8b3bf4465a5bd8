"""Writes of the engine that would pass a disk limit, and sandboxes that are above theirs."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.disk_ledger import DiskLedger
from smokebox.errors import LimitReached, SandboxGone
from smokebox.limits import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

LIMIT = 24 * MIB


@pytest.fixture
async def small(host: Host) -> Sandbox:
    return await host.create("small", limits={"disk": LIMIT})


async def chunks(count: int, size: int = MIB) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


def archive(files: int, size: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(files):
            info = tarfile.TarInfo(f"f{number}")
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    return gzip.compress(buffer.getvalue())


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def used(sandbox: Sandbox) -> int:
    return (await sandbox.stats()).disk or 0


async def test_write_that_would_pass_the_limit_is_refused(small: Sandbox) -> None:
    await small.write_file("kept", b"x" * (10 * MIB))
    with pytest.raises(LimitReached, match=f"its limit of {LIMIT}") as caught:
        await small.write_file("more", b"x" * (16 * MIB))
    assert caught.value.fields == {"limit": "disk"}
    assert "raise its limit" in caught.value.hint
    with pytest.raises(LimitReached):
        await small.files.append_file("kept", b"x" * (16 * MIB))
    with pytest.raises(LimitReached):
        await small.files.write_stream("more", chunks(100))
    await small.files.write_file("second", b"x" * (10 * MIB))
    with pytest.raises(LimitReached):
        await small.files.copy("kept", "copy")
    assert await small.readdir("/workspace") == ["kept", "second"]
    assert await used(small) < LIMIT


async def test_stream_of_small_pieces_is_counted_by_its_bytes(small: Sandbox) -> None:
    assert await small.files.write_stream("a", chunks(20_000, 10)) == 200_000


async def test_concurrent_writes_share_the_room(small: Sandbox) -> None:
    results = await asyncio.gather(
        *(small.files.write_stream(f"f{number}", chunks(8)) for number in range(6)),
        return_exceptions=True,
    )
    assert any(isinstance(result, LimitReached) for result in results)
    assert all(isinstance(result, LimitReached) or result == 8 * MIB for result in results)
    assert await used(small) <= LIMIT


async def test_removed_and_replaced_files_give_room(small: Sandbox) -> None:
    for _ in range(4):
        await small.write_file("same", b"x" * (10 * MIB))
    for number in range(4):
        await small.write_file(f"f{number}", b"x" * (12 * MIB))
        await small.rm(f"f{number}")


async def test_what_programs_wrote_counts(small: Sandbox) -> None:
    await small.exec("head -c 16M /dev/zero > big")
    with pytest.raises(LimitReached):
        await small.files.upload_tar("into", once(archive(3, 4 * MIB)))
    assert await used(small) <= LIMIT


@pytest.mark.parametrize(("files", "size"), [(1, 200 * MIB), (200, MIB), (20_000, 1)])
async def test_compressed_bomb_is_refused_below_the_limit(
    small: Sandbox, files: int, size: int
) -> None:
    data = archive(files, size)
    assert len(data) < 3 * MIB
    with pytest.raises(LimitReached) as caught:
        await small.files.upload_tar("into", once(data))
    assert caught.value.fields["limit"] == "disk"
    assert int(str(caught.value.fields["bytes"])) <= LIMIT
    # Directories, and logs outside of the files, are not in the limit.
    assert await used(small) <= LIMIT + MIB


async def test_sandbox_above_its_limit_starts_no_programs_until_there_is_room(
    host: Host, small: Sandbox
) -> None:
    # Several files: one alone would end at the limit of the size of a file.
    writer = "for i in 1 2 3 4; do head -c 12M /dev/zero > f$i; done; sleep 99"
    with pytest.raises(SandboxGone, match="disk"):
        await small.exec(writer, timeout=15)
    for _ in range(2):
        for start in (small.exec("touch more"), small.start_process("touch more")):
            with pytest.raises(LimitReached, match="starts no programs") as caught:
                await start
            assert caught.value.fields == {"limit": "disk"}
        session = await small.create_session()
        with pytest.raises(LimitReached):
            await session.exec("true")
        with pytest.raises(LimitReached):
            await small.write_file("more", b"x")
        # It stays so, also beyond the next check of the disk and another sleep.
        await asyncio.sleep(1.2)
        assert "more" not in await small.readdir("/workspace")
        await small.sleep()
        info = await small.info()
        assert info is not None
        assert "disk" in (info.stop_reason or "")
    for number in range(1, 5):
        await small.rm(f"f{number}", force=True)
    assert (await small.exec("echo free")).stdout == "free\n"


async def test_higher_limit_lets_a_full_sandbox_run(host: Host, small: Sandbox) -> None:
    with pytest.raises(SandboxGone, match="disk"):
        await small.exec(
            "for i in 1 2 3 4; do head -c 12M /dev/zero > f$i; done; sleep 99", timeout=15
        )
    with pytest.raises(LimitReached):
        await small.exec("true")
    raised = host.sandbox("small", limits={"disk": 200 * MIB})
    assert (await raised.exec("ls")).stdout.split() == ["f1", "f2", "f3", "f4"]


def test_ledger_counts_what_was_written_during_a_measurement() -> None:
    ledger = DiskLedger()
    ledger.limit = 100
    assert ledger.reserve(40)
    assert not ledger.reserve(61)
    mark = ledger.begin_measurement()
    ledger.settle(40)
    ledger.end_measurement(5, mark)
    assert (ledger.used, ledger.room) == (45, 55)
    ledger.end_measurement(45, ledger.begin_measurement())
    assert ledger.used == 45


def test_ledger_without_a_limit_refuses_nothing() -> None:
    ledger = DiskLedger()
    assert ledger.reserve(1 << 60)
    assert ledger.room is None
