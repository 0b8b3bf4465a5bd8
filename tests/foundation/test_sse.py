"""Server-sent events: encoded, and read back from chunks of any size."""

from __future__ import annotations

import random

import pytest

from smokebox.foundation import sse
from smokebox.foundation.sse import Event

EVENTS = [Event("output", b'{"a":1}', "7"), Event("message", b"x"), Event("exit", b"{}", "")]


def encode_events() -> bytes:
    encoded = [sse.encode(*event) for event in EVENTS]
    return sse.HEARTBEAT.join([b"", *encoded, b""])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_read_from_chunks_of_any_size(size: int) -> None:
    reader, data = sse.EventReader(), encode_events()
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    assert [event for chunk in chunks for event in reader.feed(chunk)] == EVENTS


def test_events_are_read_from_random_chunks() -> None:
    data = encode_events() * 20
    offsets = sorted(random.sample(range(len(data)), 50))
    reader, found = sse.EventReader(), []
    for start, end in zip([0, *offsets], [*offsets, len(data)], strict=True):
        found += reader.feed(data[start:end])
    assert found == EVENTS * 20


def test_heartbeats_are_ignored() -> None:
    assert sse.EventReader().feed(sse.HEARTBEAT * 3) == []


def test_data_lines_are_joined() -> None:
    assert sse.EventReader().feed(b"data: a\ndata:b\n\n") == [Event("message", b"a\nb")]


def test_unterminated_event_is_refused_at_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT", 100)
    reader = sse.EventReader()
    with pytest.raises(ValueError, match="more than 100 bytes"):
        for _ in range(20):
            reader.feed(b"data: " + b"x" * 50)


def test_event_below_the_size_limit_is_read_from_small_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT", 100)
    reader, data = sse.EventReader(), b"event: a\ndata: " + b"x" * 60 + b"\n\n"
    found = [event for byte in data * 3 for event in reader.feed(bytes([byte]))]
    assert found == [Event("a", b"x" * 60)] * 3
