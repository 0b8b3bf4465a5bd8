"""Counters of the server, in the format of Prometheus.

Labels have few values: routes are templates, without the ids in them.
"""

from __future__ import annotations

import platform
from collections import Counter as StatusCounts
from typing import TYPE_CHECKING, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from smokebox import __version__
from smokebox.types import ExecResult, NetworkVerdict, SandboxStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.engine.egress.audit_log import TrafficTotals
    from smokebox.server.health import Drain
    from smokebox.types import CodeExecution, SandboxInfo

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WS"})
_REFUSALS = (
    "missing",
    "malformed",
    "unknown",
    "expired",
    "scope",
    "admin",
    "host",
    "origin",
)
_OUTCOMES = ("success", "failure", "timeout")
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _RouteMetrics(NamedTuple):
    requests: Counter
    seconds: Histogram
    received: Counter
    sent: Counter


class Metrics:
    """The counters of one server, in their own registry."""

    def __init__(self, drain: Drain) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        build = Gauge(
            "smokebox_build_info",
            "Version of Smokebox and of Python.",
            ["version", "python"],
            registry=registry,
        )
        build.labels(__version__, platform.python_version()).set(1)
        running = Gauge("smokebox_requests_in_flight", "Requests in progress.", registry=registry)
        running.set_function(lambda: drain.requests)
        route = ["route", "method"]
        self._requests = Counter(
            "smokebox_requests", "Finished requests.", [*route, "status"], registry=registry
        )
        self._seconds = Histogram(
            "smokebox_request_seconds",
            "Duration of requests, streams to their end.",
            route,
            buckets=_BUCKETS,
            registry=registry,
        )
        self._received = Counter(
            "smokebox_received_bytes", "Bytes of request bodies.", route, registry=registry
        )
        self._sent = Counter(
            "smokebox_sent_bytes", "Bytes of response bodies.", route, registry=registry
        )
        self._refused = Counter(
            "smokebox_auth_failures",
            "Requests that failed authentication or authorization.",
            ["reason"],
            registry=registry,
        )
        previews = Counter(
            "smokebox_previews",
            "Responses of previews by the first digit of their status.",
            ["status"],
            registry=registry,
        )
        self._previews = [previews.labels(f"{digit}xx") for digit in range(1, 6)]
        self._execs = Counter(
            "smokebox_execs", "Finished commands by outcome.", ["outcome"], registry=registry
        )
        self._codes = Counter(
            "smokebox_code_runs",
            "Finished runs of code by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._sandboxes = Gauge(
            "smokebox_sandboxes", "Sandboxes by status.", ["status"], registry=registry
        )
        self._network = Gauge(
            "smokebox_network_events",
            "Network events of sandboxes by verdict.",
            ["verdict"],
            registry=registry,
        )
        self._traffic = Gauge(
            "smokebox_network_bytes",
            "Bytes that sandboxes sent to and received from the network.",
            ["direction"],
            registry=registry,
        )
        for reason in _REFUSALS:
            self._refused.labels(reason)
        for outcome in _OUTCOMES:
            self._execs.labels(outcome)
            self._codes.labels(outcome)
        self._by_route: dict[tuple[str, str, int], _RouteMetrics] = {}

    def count_request(
        self, route: str, method: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """Count a finished request."""
        metrics = self._by_route.get((route, method, status))
        if metrics is None:
            metrics = self._create(route, method, status)
        metrics.requests.inc()
        metrics.seconds.observe(seconds)
        if received:
            metrics.received.inc(received)
        if sent:
            metrics.sent.inc(sent)

    def previewed(self, status: int) -> None:
        """Count a response of a preview."""
        self._previews[min(status // 100, 5) - 1].inc()

    def count_refusal(self, reason: object) -> None:
        """Count a request that failed authentication or authorization."""
        if reason in _REFUSALS:
            self._refused.labels(str(reason)).inc()

    def count_execution(self, result: ExecResult | CodeExecution) -> None:
        """Count a finished command or run of code."""
        outcome = "success" if result.success else "failure"
        if result.timed_out:
            outcome = "timeout"
        counter = self._execs if isinstance(result, ExecResult) else self._codes
        counter.labels(outcome).inc()

    def render(self, sandboxes: Iterable[SandboxInfo], traffic: TrafficTotals) -> bytes:
        """Return all metrics as text."""
        for verdict in get_args(NetworkVerdict):
            self._network.labels(verdict).set(traffic.events[verdict])
        self._traffic.labels("sent").set(traffic.sent)
        self._traffic.labels("received").set(traffic.received)
        counts = StatusCounts(info.status for info in sandboxes)
        for status in get_args(SandboxStatus):
            self._sandboxes.labels(status).set(counts[status])
        return generate_latest(self._registry)

    def _create(self, route: str, method: str, status: int) -> _RouteMetrics:
        known = method if method in _METHODS else "other"
        metrics = self._by_route[route, known, status] = _RouteMetrics(
            self._requests.labels(route, known, str(status)),
            self._seconds.labels(route, known),
            self._received.labels(route, known),
            self._sent.labels(route, known),
        )
        return metrics
