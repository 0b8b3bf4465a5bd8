"""The ring buffer of the last output."""

from __future__ import annotations

import random

from smokebox.engine.terminals.output import ReplayBuffer


def test_buffer_keeps_the_last_bytes() -> None:
    replay = ReplayBuffer(8)
    replay.add(b"hello ")
    replay.add(b"world")
    assert (replay.start, replay.end) == (3, 11)
    assert replay.read(replay.start, 100) == b"lo world"


def test_oversized_data_keeps_its_end() -> None:
    replay = ReplayBuffer(4)
    replay.add(b"0123456789")
    assert (replay.start, replay.read(6, 100)) == (6, b"6789")


def test_read_returns_at_most_the_requested_size() -> None:
    replay = ReplayBuffer(8)
    replay.add(b"0123456789")
    assert replay.read(7, 2) == b"78"
    assert replay.read(10, 5) == b""


def test_reads_match_the_end_of_all_added_data() -> None:
    generator = random.Random(7)
    replay, everything = ReplayBuffer(100), b""
    for _ in range(300):
        data = generator.randbytes(generator.randrange(150))
        replay.add(data)
        everything += data
        start = generator.randint(replay.start, replay.end)
        assert replay.end == len(everything)
        assert replay.read(start, 60) == everything[start : start + 60]
