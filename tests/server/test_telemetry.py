"""Spans of requests, as received by an OTLP collector."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A server that receives spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.url = ""
        self.service = ""
        self.spans: list[Any] = []

    async def receive(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            self.service = _values(resource.resource.attributes)["service.name"]
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")


@contextlib.asynccontextmanager
async def run_collector() -> AsyncIterator[Collector]:
    server = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", server.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = "http://{}:{}".format(*runner.addresses[0])
    try:
        yield server
    finally:
        await runner.cleanup()


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: item.value.string_value or item.value.int_value for item in attributes}


async def test_span_of_a_request_is_a_child_of_its_caller(tmp_path: Path) -> None:
    async with run_collector() as collector:
        settings = ServerSettings(home=str(tmp_path / "home"), pool=0, otlp_endpoint=collector.url)
        async with run_server(settings) as server:
            connector = aiohttp.UnixConnector(server.socket)
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
            async with (
                aiohttp.ClientSession("http://localhost", connector=connector) as http,
                http.get("/api/sandboxes/ghost", headers=headers) as response,
            ):
                assert response.status == 404
        (span,) = collector.spans
    assert collector.service == "smokebox"
    assert span.name == "GET /api/sandboxes/{id}"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert _values(span.attributes) == {
        "http.request.method": "GET",
        "http.route": "/api/sandboxes/{id}",
        "http.response.status_code": 404,
        "smokebox.principal": "local",
        "smokebox.request_id": "mine",
        "smokebox.sandbox": "ghost",
    }


async def test_endpoint_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "boxes")
        async with run_server(ServerSettings(home=str(tmp_path / "home"), pool=0)) as server:
            connector = aiohttp.UnixConnector(server.socket)
            async with (
                aiohttp.ClientSession("http://localhost", connector=connector) as http,
                http.get("/api/nothing") as response,
            ):
                assert response.status == 404
        (span,) = collector.spans
    assert (collector.service, span.name) == ("boxes", "GET none")
    assert len(span.trace_id.hex()) == 32
    assert not span.parent_span_id


async def test_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    program = (
        "import sys, smokebox.server.server as server; "
        "from smokebox.server.settings import ServerSettings; "
        "assert server.Telemetry.open(ServerSettings(home='h')) is None; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False)
    assert done.returncode == 0


async def test_endpoint_without_the_extra_names_the_package_to_install() -> None:
    program = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from smokebox.errors import MissingDependency\n"
        "from smokebox.server.settings import ServerSettings\n"
        "from smokebox.server.telemetry import Telemetry\n"
        "try: Telemetry.open(ServerSettings(home='h', otlp_endpoint='http://localhost:4318'))\n"
        "except MissingDependency as error: print(error.hint)\n"
    )
    command = [sys.executable, "-c", program]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    assert b"pip install 'smokebox[telemetry]'" in done.stdout
