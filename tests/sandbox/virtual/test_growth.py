"""Growth of the process's memory since a script started."""

from __future__ import annotations

from smokebox.sandbox.virtual.thread_sandbox import Growth, resident_bytes


def test_growth_counts_from_the_start() -> None:
    growth = Growth(800 << 20)
    assert not growth.is_too_much
    small = Growth(20 << 20)
    # Much more than the kernel may reclaim from this process at the same moment.
    data = bytearray(b"x") * (400 << 20)
    assert small.is_too_much
    assert not growth.is_too_much
    assert len(data) < resident_bytes()
