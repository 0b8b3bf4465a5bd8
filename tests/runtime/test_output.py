"""Bounded output: head, tail and marker in memory, the whole stream on disk."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from io import FileIO
from pathlib import Path

import pytest

from smokebox.runtime.output import FLUSH_SIZE, Collector, Decoder, Output
from smokebox.runtime.spill import Spill, SpillFolder


def collect(output: Output, data: bytes, step: int) -> None:
    for start in range(0, len(data), step):
        output.feed(data[start : start + step])
        if output.needs_flush:
            output.flush()


def test_short_output_is_kept_without_a_file() -> None:
    output = Output(SpillFolder(), limit=10)
    collect(output, b"0123456789", 3)
    captured = output.finish()
    assert (captured.text, captured.truncated, captured.file) == ("0123456789", False, None)


def test_no_output_is_empty_text() -> None:
    assert Output(SpillFolder()).finish().text == ""


def test_long_output_keeps_head_and_tail_around_a_marker() -> None:
    folder = SpillFolder()
    output = Output(folder, limit=8)
    collect(output, b"abcdefghijklmnop", 5)
    captured = output.finish()
    head, marker, tail = captured.text.split("\n")
    assert (head, tail, captured.truncated) == ("abcd", "mnop", True)
    assert marker == f"[smokebox: 8 bytes left out here; the whole stream is in {captured.file}]"
    folder.close()


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_file_holds_the_whole_stream(step: int) -> None:
    folder = SpillFolder()
    output = Output(folder, limit=1000)
    data = os.urandom(20_000)
    collect(output, data, step)
    captured = output.finish()
    assert captured.file is not None
    assert Path(captured.file).read_bytes() == data
    folder.close()


def test_memory_does_not_grow_with_the_stream() -> None:
    folder = SpillFolder()
    output = Output(folder, limit=1 << 20)
    for _ in range(200):
        output.feed(bytes(1 << 18))
        if output.needs_flush:
            output.flush()
    size = sum(map(len, (*output._head, *output._tail, *output._unflushed)))
    assert size <= (1 << 20) + 2 * FLUSH_SIZE
    folder.close()


@pytest.mark.parametrize("limit", range(8, 40))
def test_no_character_is_split_at_the_marker(limit: int) -> None:
    output = Output(SpillFolder(), limit=limit)
    collect(output, "aé€😀".encode() * 10, 3)
    text = output.finish().text
    assert "�" not in text
    assert text.startswith("aé")


@pytest.mark.parametrize("limit", range(1, 12))
def test_marker_counts_omitted_bytes(limit: int) -> None:
    output = Output(SpillFolder(), limit=limit)
    data = "€é".encode() * 20
    collect(output, data, 6)
    head, marker, tail = output.finish().text.split("\n")
    count = int(marker.split()[1])
    assert count == len(data) - len(head.encode()) - len(tail.encode())


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    output = Output(SpillFolder())
    output.feed(b"a\xff\xfeb")
    assert output.finish().text == "a��b"


def test_decoder_waits_for_the_rest_of_a_character() -> None:
    decoder = Decoder()
    parts = [decoder.feed(bytes([byte])) for byte in "é€😀".encode()]
    assert [part for part in parts if part] == ["é", "€", "😀"]
    assert decoder.finish() == ""


def test_decoder_replaces_an_incomplete_character_at_the_end() -> None:
    decoder = Decoder()
    assert decoder.feed("€".encode()[:2]) == ""
    assert decoder.finish() == "�"


def test_full_disk_loses_only_the_file(tmp_path: Path) -> None:
    folder = SpillFolder()
    output = Output(folder, limit=8)
    collect(output, b"0123456789", 5)
    output.abandon()
    path = tmp_path / "stream"
    output._spill = Spill(folder, str(path), str(path), FileIO("/dev/full", "w"))
    collect(output, b"abcdefghij", 5)
    captured = output.finish()
    assert captured.file is None
    assert (
        captured.text
        == "0123\n[smokebox: 12 bytes left out here; the whole stream was not kept]\nghij"
    )


def test_missing_directory_loses_only_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    output = Output(SpillFolder(), limit=4)
    output.feed(b"0123456789")
    captured = output.finish()
    assert captured.truncated
    assert captured.file is None


def test_stream_beyond_the_folder_limit_is_not_kept() -> None:
    folder = SpillFolder(max_bytes=100)
    output = Output(folder, limit=10)
    output.feed(bytes(101))
    assert output.finish().file is None
    folder.close()


def spill(folder: SpillFolder, size: int) -> Path:
    output = Output(folder, limit=1)
    output.feed(bytes(size))
    file = output.finish().file
    assert file is not None
    return Path(file)


def test_oldest_files_are_removed_when_there_are_too_many() -> None:
    folder = SpillFolder(max_files=2)
    files = [spill(folder, 10) for _ in range(3)]
    assert [file.exists() for file in files] == [False, True, True]
    folder.close()


def test_oldest_files_are_removed_when_they_are_too_large() -> None:
    folder = SpillFolder(max_bytes=100)
    files = [spill(folder, 40) for _ in range(3)]
    assert [file.exists() for file in files] == [False, True, True]
    folder.close()


def test_files_are_private_to_the_user() -> None:
    folder = SpillFolder()
    file = spill(folder, 10)
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0
    folder.close()


def test_close_removes_everything_and_is_safe_to_repeat() -> None:
    folder = SpillFolder()
    file = spill(folder, 10)
    folder.close()
    folder.close()
    assert not file.parent.exists()


def test_abandoned_stream_leaves_no_file() -> None:
    folder = SpillFolder()
    output = Output(folder, limit=1)
    output.feed(b"12345")
    output.flush()
    assert output._spill is not None
    path = Path(output._spill.path)
    output.abandon()
    assert not path.exists()
    folder.close()


def test_folder_is_removed_with_its_last_reference() -> None:
    folder = SpillFolder()
    path = spill(folder, 10).parent
    del folder
    gc.collect()
    assert not path.exists()


def test_closed_folder_can_be_used_again() -> None:
    folder = SpillFolder()
    spill(folder, 10)
    folder.close()
    assert spill(folder, 10).exists()
    folder.close()


async def test_collector_separates_streams() -> None:
    collector = Collector(SpillFolder())
    await collector.feed("stdout", b"out")
    await collector.feed("stderr", b"err")
    await collector.feed("stdout", b"put")
    collected = await collector.finish()
    assert (collected.stdout.text, collected.stderr.text) == ("output", "err")


async def test_collector_spills_while_it_is_fed() -> None:
    folder = SpillFolder()
    collector = Collector(folder, limit=1000)
    pieces = [os.urandom(1 << 20) for _ in range(20)]
    for piece in pieces:
        await collector.feed("stderr", piece)
    file = (await collector.finish()).stderr.file
    assert file is not None
    assert await asyncio.to_thread(Path(file).read_bytes) == b"".join(pieces)
    folder.close()


def test_discard_during_a_write_is_safe() -> None:
    folder = SpillFolder()
    for _ in range(20):
        opened = folder.open()
        writer = threading.Thread(target=opened.write, args=([bytes(1 << 20)] * 4,))
        writer.start()
        folder.discard(opened)
        writer.join()
        assert opened._file.closed
        assert not os.path.exists(opened.path)
    folder.close()
