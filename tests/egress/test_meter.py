"""Traffic limits of a sandbox, under a policy that can change."""

from __future__ import annotations

import dataclasses

from smokebox.egress.meter import Meter
from smokebox.egress.policy import Egress


class MeteredPolicy:
    """A policy that can be replaced, and its meter."""

    def __init__(self, policy: Egress) -> None:
        self.policy = policy
        self.meter = Meter(lambda: self.policy)


def test_everything_passes_without_limits() -> None:
    meter = MeteredPolicy(Egress(internet=True)).meter
    assert not any(meter.admit() or meter.count(1 << 30) for _ in range(100))


def test_requests_are_limited_by_the_current_policy() -> None:
    metered = MeteredPolicy(Egress(internet=True, max_requests=2))
    assert [metered.meter.admit() for _ in range(3)] == ["", "", "max_requests=2 is reached"]
    metered.policy = dataclasses.replace(metered.policy, max_requests=3)
    assert metered.meter.admit() == ""


def test_bytes_are_limited() -> None:
    meter = MeteredPolicy(Egress(internet=True, max_bytes=100)).meter
    assert meter.count(60) == ""
    assert meter.count(40) == ""
    assert meter.count(1) == "max_bytes=100 is reached"
    assert meter.admit() == "max_bytes=100 is reached"


def test_rate_is_limited_and_recovers() -> None:
    meter = MeteredPolicy(Egress(internet=True, requests_per_second=1000)).meter
    refused = [meter.admit() for _ in range(3000)]
    assert "more than requests_per_second=1000" in refused
    meter._filled_at -= 10
    assert meter.admit() == ""


def test_refused_requests_are_not_counted() -> None:
    meter = MeteredPolicy(Egress(internet=True, requests_per_second=0.001)).meter
    assert [bool(meter.admit()) for _ in range(3)] == [False, True, True]
    assert meter.requests == 1
