"""Server-sent events: what was written is read, however the bytes are cut."""

from __future__ import annotations

import random

import pytest

from smokebox.foundation import sse
from smokebox.foundation.sse import Event

EVENTS = [Event("output", b'{"a":1}', "7"), Event("message", b"x"), Event("exit", b"{}", "")]


def written() -> bytes:
    pieces = [sse.encode(*event) for event in EVENTS]
    return sse.HEARTBEAT.join([b"", *pieces, b""])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_they_are_cut(size: int) -> None:
    reader, data = sse.EventReader(), written()
    cuts = [data[at : at + size] for at in range(0, len(data), size)]
    assert [event for cut in cuts for event in reader.feed(cut)] == EVENTS


def test_events_are_whole_at_random_cuts() -> None:
    data = written() * 20
    cuts = sorted(random.sample(range(len(data)), 50))
    reader, found = sse.EventReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found += reader.feed(data[begin:end])
    assert found == EVENTS * 20


def test_heartbeats_are_no_events() -> None:
    assert sse.EventReader().feed(sse.HEARTBEAT * 3) == []


def test_data_of_several_lines_is_joined() -> None:
    assert sse.EventReader().feed(b"data: a\ndata:b\n\n") == [Event("message", b"a\nb")]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT", 100)
    reader = sse.EventReader()
    with pytest.raises(ValueError, match="more than 100 bytes"):
        for _ in range(20):
            reader.feed(b"data: " + b"x" * 50)
