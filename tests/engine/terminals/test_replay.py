"""The ring that keeps the last output."""

from __future__ import annotations

import random

from smokebox.engine.terminals.output import ReplayBuffer


def test_it_gives_what_was_added_last() -> None:
    replay = ReplayBuffer(8)
    replay.add(b"hello ")
    replay.add(b"world")
    assert (replay.start, replay.end) == (3, 11)
    assert replay.read(replay.start, 100) == b"lo world"


def test_of_more_than_it_holds_it_keeps_the_end() -> None:
    replay = ReplayBuffer(4)
    replay.add(b"0123456789")
    assert (replay.start, replay.read(6, 100)) == (6, b"6789")


def test_a_read_gives_at_most_what_was_asked_for() -> None:
    replay = ReplayBuffer(8)
    replay.add(b"0123456789")
    assert replay.read(7, 2) == b"78"
    assert replay.read(10, 5) == b""


def test_it_is_the_end_of_everything_that_was_added() -> None:
    chance = random.Random(7)
    replay, everything = ReplayBuffer(100), b""
    for _ in range(300):
        data = chance.randbytes(chance.randrange(150))
        replay.add(data)
        everything += data
        begin = chance.randint(replay.start, replay.end)
        assert replay.end == len(everything)
        assert replay.read(begin, 60) == everything[begin : begin + 60]
