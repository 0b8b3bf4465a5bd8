"""What the process has grown by."""

from __future__ import annotations

from smokebox.sandbox.virtual.growth import Growth, resident_bytes


def test_it_counts_from_the_start() -> None:
    growth = Growth(200 << 20)
    assert not growth.is_too_much
    small = Growth(20 << 20)
    held = bytearray(b"x") * (60 << 20)
    assert small.is_too_much
    assert not growth.is_too_much
    assert len(held) < resident_bytes()
