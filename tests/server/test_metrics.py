"""What operators count: requests by route, refusals, sandboxes, and no label without end."""

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


def _read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _labels(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


async def _text(http: aiohttp.ClientSession, path: str) -> str:
    async with http.get(path) as answer:
        assert answer.status == 200
        return await answer.text()


async def test_requests_are_counted_by_route_and_never_by_id(http: aiohttp.ClientSession) -> None:
    for number in range(3):
        async with http.put(f"/api/sandboxes/box{number}", json={}) as answer:
            assert answer.status == 200
    async with http.get("/api/sandboxes/ghost") as answer:
        assert answer.status == 404
    async with http.request("PROPFIND", "/api/sandboxes/ghost") as answer:
        assert answer.status == 405
    async with http.get("/nothing/at/ghost") as answer:
        assert answer.status == 404
    text = await _text(http, "/metrics")
    found = _read(text)
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


async def test_the_server_counts_what_it_is_at(http: aiohttp.ClientSession) -> None:
    async with http.put("/api/sandboxes/box", json={}) as answer:
        assert answer.status == 200
    command = {"command": "echo hi; sleep 60"}
    async with http.post("/api/sandboxes/box/exec/stream", json=command) as stream:
        await stream.content.readuntil(b"\n\n")
        assert _read(await _text(http, "/api/metrics"))["smokebox_requests_in_flight", ()] == 1
    async with asyncio.timeout(10):
        while _read(await _text(http, "/metrics"))["smokebox_requests_in_flight", ()]:
            await asyncio.sleep(0.01)


async def test_refusals_are_counted_by_their_reason(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
        for headers in ({}, {}, {"authorization": "Bearer x"}, {"origin": "https://evil.example"}):
            async with session.get("/metrics", headers=headers) as answer:
                assert answer.status in (401, 403)
        found = _read(server.state.metrics.render([], TrafficTotals()).decode())
    failures = "smokebox_auth_failures_total"
    assert found[failures, _labels(reason="missing")] == 2
    assert found[failures, _labels(reason="malformed")] == 1
    assert found[failures, _labels(reason="origin")] == 1


def test_commands_are_counted_by_how_they_ended() -> None:
    metrics = Metrics(Drain())
    for result in (
        ExecResult(exit_code=0),
        ExecResult(exit_code=1),
        ExecResult(exit_code=124),
        ExecResult(exit_code=124, timed_out=True),
    ):
        metrics.executed(result)
    found = _read(metrics.render([], TrafficTotals()).decode())
    counts = [found["smokebox_execs_total", _labels(outcome=one)] for one in _OUTCOMES]
    assert counts == [1, 2, 1]


_OUTCOMES = ("success", "failure", "timeout")


async def test_the_build_and_the_process_are_told(http: aiohttp.ClientSession) -> None:
    text = await _text(http, "/metrics")
    assert re.search(r'smokebox_build_info\{python="3[^"]*",version="[^"]+"\} 1\.0', text)
    assert "process_resident_memory_bytes" in text


async def test_a_server_that_cannot_write_is_not_ready(
    server: RunningServer, http: aiohttp.ClientSession
) -> None:
    home = server.state.settings.home
    async with http.get("/api/ready") as answer:
        assert answer.status == 200
    os.mkdir(os.path.join(home, ".ready"))
    async with asyncio.timeout(10):
        while (answer := await http.get("/api/ready")).status == 200:
            await answer.read()
            await asyncio.sleep(0.05)
    error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (503, "service_unavailable")
    assert "cannot be written" in error["message"]
    assert answer.headers["retry-after"] == "1"
    os.rmdir(os.path.join(home, ".ready"))


async def test_an_engine_that_is_closed_is_not_ready(
    server: RunningServer, http: aiohttp.ClientSession
) -> None:
    await server.state.host.aclose()
    async with http.get("/api/ready") as answer:
        assert answer.status == 503
    async with http.get("/api/health") as answer:
        assert (answer.status, (await answer.json())["ok"]) == (200, True)
