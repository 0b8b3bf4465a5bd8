"""How much may pass, by the policy of the moment."""

from __future__ import annotations

import dataclasses

from smokebox.egress.meter import Meter
from smokebox.egress.policy import Egress


class Box:
    """What holds the policy of the moment."""

    def __init__(self, policy: Egress) -> None:
        self.policy = policy
        self.meter = Meter(lambda: self.policy)


def test_without_bounds_everything_passes() -> None:
    meter = Box(Egress(internet=True)).meter
    assert not any(meter.admit() or meter.count(1 << 30) for _ in range(100))


def test_requests_are_counted() -> None:
    box = Box(Egress(internet=True, max_requests=2))
    assert [box.meter.admit() for _ in range(3)] == ["", "", "max_requests=2 is reached"]
    box.policy = dataclasses.replace(box.policy, max_requests=3)
    assert box.meter.admit() == ""


def test_bytes_are_counted_both_ways() -> None:
    meter = Box(Egress(internet=True, max_bytes=100)).meter
    assert meter.count(60) == ""
    assert meter.count(40) == ""
    assert meter.count(1) == "max_bytes=100 is reached"
    assert meter.admit() == "max_bytes=100 is reached"


def test_the_rate_is_held_and_recovers() -> None:
    meter = Box(Egress(internet=True, requests_per_second=1000)).meter
    refused = [meter.admit() for _ in range(3000)]
    assert "more than requests_per_second=1000" in refused
    meter._filled_at -= 10
    assert meter.admit() == ""


def test_what_was_refused_is_not_counted() -> None:
    meter = Box(Egress(internet=True, requests_per_second=0.001)).meter
    assert [bool(meter.admit()) for _ in range(3)] == [False, True, True]
    assert meter.requests == 1
