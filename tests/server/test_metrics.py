"""Metrics for Prometheus, and readiness."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from smokebox.engine.egress.audit_log import TrafficTotals
from smokebox.server.health import Drain
from smokebox.server.metrics import Metrics
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.types import ExecResult

if TYPE_CHECKING:
    from pathlib import Path

ROUTE = "/api/sandboxes/{id}"


def _parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _labels(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


async def _text(http: aiohttp.ClientSession, path: str) -> str:
    async with http.get(path) as response:
        assert response.status == 200
        return await response.text()


async def test_requests_are_counted_by_route_without_ids(http: aiohttp.ClientSession) -> None:
    for number in range(3):
        async with http.put(f"/api/sandboxes/box{number}", json={}) as response:
            assert response.status == 200
    async with http.get("/api/sandboxes/ghost") as response:
        assert response.status == 404
    async with http.request("PROPFIND", "/api/sandboxes/ghost") as response:
        assert response.status == 405
    async with http.get("/nothing/at/ghost") as response:
        assert response.status == 404
    text = await _text(http, "/metrics")
    found = _parse(text)
    total = "smokebox_requests_total"
    assert found[total, _labels(route=ROUTE, method="PUT", status="200")] == 3
    assert found[total, _labels(route=ROUTE, method="GET", status="404")] == 1
    assert found[total, _labels(route="none", method="GET", status="404")] == 1
    assert found["smokebox_request_seconds_count", _labels(route=ROUTE, method="PUT")] == 3
    assert found["smokebox_received_bytes_total", _labels(route=ROUTE, method="PUT")] == 6
    assert found["smokebox_sent_bytes_total", _labels(route=ROUTE, method="PUT")] > 100
    assert found["smokebox_sandboxes", _labels(status="active")] == 3
    assert "ghost" not in text
    assert "box0" not in text
    assert "PROPFIND" not in text


async def test_running_requests_are_counted(http: aiohttp.ClientSession) -> None:
    async with http.put("/api/sandboxes/box", json={}) as response:
        assert response.status == 200
    command = {"command": "echo hi; sleep 60"}
    async with http.post("/api/sandboxes/box/exec/stream", json=command) as stream:
        await stream.content.readuntil(b"\n\n")
        assert _parse(await _text(http, "/api/metrics"))["smokebox_requests_in_flight", ()] == 1
    async with asyncio.timeout(10):
        while _parse(await _text(http, "/metrics"))["smokebox_requests_in_flight", ()]:
            await asyncio.sleep(0.01)


async def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
        for headers in ({}, {}, {"authorization": "Bearer x"}, {"origin": "https://evil.example"}):
            async with session.get("/metrics", headers=headers) as response:
                assert response.status in (401, 403)
        found = _parse(server.state.metrics.render([], TrafficTotals()).decode())
    failures = "smokebox_auth_failures_total"
    assert found[failures, _labels(reason="missing")] == 2
    assert found[failures, _labels(reason="malformed")] == 1
    assert found[failures, _labels(reason="origin")] == 1


def test_commands_are_counted_by_outcome() -> None:
    metrics = Metrics(Drain())
    for result in (
        ExecResult(exit_code=0),
        ExecResult(exit_code=1),
        ExecResult(exit_code=124),
        ExecResult(exit_code=124, timed_out=True),
    ):
        metrics.count_execution(result)
    found = _parse(metrics.render([], TrafficTotals()).decode())
    outcomes = ("success", "failure", "timeout")
    counts = [found["smokebox_execs_total", _labels(outcome=outcome)] for outcome in outcomes]
    assert counts == [1, 2, 1]


async def test_build_and_process_metrics(http: aiohttp.ClientSession) -> None:
    text = await _text(http, "/metrics")
    assert re.search(r'smokebox_build_info\{python="3[^"]*",version="[^"]+"\} 1\.0', text)
    assert "process_resident_memory_bytes" in text


async def test_server_that_cannot_write_is_not_ready(
    server: RunningServer, http: aiohttp.ClientSession
) -> None:
    home = server.state.settings.home
    async with http.get("/api/ready") as response:
        assert response.status == 200
    os.mkdir(os.path.join(home, ".ready"))
    async with asyncio.timeout(10):
        while (response := await http.get("/api/ready")).status == 200:
            await response.read()
            await asyncio.sleep(0.05)
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (503, "service_unavailable")
    assert "cannot be written" in error["message"]
    assert response.headers["retry-after"] == "1"
    os.rmdir(os.path.join(home, ".ready"))


async def test_server_with_a_closed_engine_is_not_ready(
    server: RunningServer, http: aiohttp.ClientSession
) -> None:
    await server.state.host.aclose()
    async with http.get("/api/ready") as response:
        assert response.status == 503
    async with http.get("/api/health") as response:
        assert (response.status, (await response.json())["ok"]) == (200, True)
