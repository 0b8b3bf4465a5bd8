"""Shutdown of a server by signal, by request and when idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import asyncio, json, sys
from smokebox.server import request_log
from smokebox.server.server import serve
from smokebox.server.settings import ServerSettings

async def ready(server):
    print(server.url, flush=True)

request_log.configure(json=True)
settings = ServerSettings(host="127.0.0.1", pool=0, **json.loads(sys.argv[1]))
asyncio.run(serve(settings, ready))
"""


class ServerProcess:
    """A server in a child process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.http = aiohttp.ClientSession(url)

    async def json(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, path, **options) as response:
            return response.status, await response.json()

    async def wait(self) -> tuple[int, str]:
        """Wait for its exit, and return its exit code and its log."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            log = await self.process.stderr.read()
            return await self.process.wait(), log.decode()


@contextlib.asynccontextmanager
async def run_server_process(home: Path, **settings: object) -> AsyncIterator[ServerProcess]:
    arguments = json.dumps({"home": str(home), **settings})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, arguments, stdout=-1, stderr=-1
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        url = (await process.stdout.readline()).decode().strip()
    server = ServerProcess(process, url)
    try:
        yield server
    finally:
        if process.returncode is None:
            # After a signal alone, sandboxes keep running for the next server.
            with contextlib.suppress(aiohttp.ClientError):
                await server.json("POST", "/api/shutdown", json={})
            process.terminate()
            await process.communicate()
        await server.http.close()


async def test_sandboxes_survive_a_restart_and_sleep_at_shutdown(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home") as first:
        await first.json("PUT", "/api/sandboxes/box", json={})
        command = {"command": "sleep 1000", "id": "long"}
        _, before = await first.json("POST", "/api/sandboxes/box/processes", json=command)
        first.process.send_signal(signal.SIGTERM)
        assert (await first.wait())[0] == 0
    async with run_server_process(tmp_path / "home") as second:
        _, after = await second.json("GET", "/api/sandboxes/box/processes/long")
        assert (after["status"], after["pid"]) == ("running", before["pid"])
        status, response = await second.json("POST", "/api/shutdown", json={"sandboxes": "sleep"})
        assert (status, response["draining"]) == (202, True)
        assert (await second.wait())[0] == 0
    async with run_server_process(tmp_path / "home") as third:
        _, info = await third.json("GET", "/api/sandboxes/box")
        assert info["status"] == "idle"


async def test_signals_do_not_interrupt_a_shutdown(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home") as first:
        for number in range(3):
            await first.json("PUT", f"/api/sandboxes/box{number}", json={})
        await first.json("POST", "/api/shutdown", json={"sandboxes": "sleep"})
        while first.process.returncode is None:
            first.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
    async with run_server(ServerSettings(home=str(tmp_path / "home"), pool=0)) as second:
        assert {info.status for info in await second.state.host.list()} == {"idle"}


async def test_drain_finishes_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home", drain_seconds=20) as server:
        await server.json("PUT", "/api/sandboxes/box", json={})
        path, last = "/api/sandboxes/box/exec", {"command": "touch b; sleep 1; touch go; echo ok"}
        first = {"command": "touch a; while [ ! -e go ]; do sleep 0.05; done; echo ok"}
        running = [
            asyncio.create_task(server.json("POST", path, json=command))
            for command in (first, last)
        ]
        await _wait_for_file(server, "a")
        await _wait_for_file(server, "b")
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (await server.json("GET", "/api/ready"))[0] != 503:
                await asyncio.sleep(0.01)
        assert (await server.json("GET", "/api/health"))[1]["draining"] is True
        async with server.http.post(path, json={"command": "true"}) as refused:
            error = (await refused.json())["error"]
            assert (refused.status, error["code"]) == (503, "service_unavailable")
            assert (error["retryable"], refused.headers["retry-after"]) == (True, "2")
            assert refused.headers["connection"] == "close"
        assert [response["stdout"] for _, response in await asyncio.gather(*running)] == [
            "ok\n"
        ] * 2
        assert (await server.wait())[0] == 0
    await _stop_sandboxes(tmp_path / "home")


async def test_drain_ends_long_streams_with_an_error_event(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home", drain_seconds=0.1) as server:
        await server.json("PUT", "/api/sandboxes/box", json={})
        path = "/api/sandboxes/box/exec/stream"
        async with server.http.post(path, json={"command": "echo hi; sleep 60"}) as stream:
            assert b"hi" in await stream.content.readuntil(b"\n\n")
            server.process.send_signal(signal.SIGTERM)
            name, data = (await stream.content.read()).decode().strip().split("\n")
        error = json.loads(data.removeprefix("data: "))
        assert (name, error["code"]) == ("event: error", "service_unavailable")
        assert error["retryable"] is True
        assert (await server.wait())[0] == 0
    await _stop_sandboxes(tmp_path / "home")


async def test_drain_closes_websockets_with_1012(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home", drain_seconds=0.1) as server:
        await server.json("PUT", "/api/sandboxes/box", json={})
        await server.json("POST", "/api/sandboxes/box/terminals", json={"id": "t"})
        async with server.http.ws_connect("/api/sandboxes/box/terminals/t") as socket:
            async with asyncio.timeout(20):
                while '"ready"' not in str((await socket.receive()).data):
                    pass
                server.process.send_signal(signal.SIGTERM)
                while (last := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                    pass
        assert (last.data, last.extra) == (1012, "the server is about to stop.")
        assert (await server.wait())[0] == 0
    await _stop_sandboxes(tmp_path / "home")


async def test_second_signal_cancels_running_requests(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home", drain_seconds=1000) as server:
        await server.json("PUT", "/api/sandboxes/box", json={})
        path = "/api/sandboxes/box/exec/stream"
        async with server.http.post(path, json={"command": "echo hi; sleep 60"}) as stream:
            await stream.content.readuntil(b"\n\n")
            server.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(10):
                while (await server.json("GET", "/api/ready"))[0] != 503:
                    await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGINT)
            assert b"service_unavailable" in await stream.content.read()
        assert (await server.wait())[0] == 0
    await _stop_sandboxes(tmp_path / "home")


async def test_idle_server_exits(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home", idle_exit=0.2) as server:
        assert (await server.wait())[0] == 0


async def test_server_with_a_running_sandbox_is_not_idle(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), pool=0, idle_exit=2)
    async with run_server(settings) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with (
            aiohttp.ClientSession("http://localhost", connector=connector) as http,
            http.put("/api/sandboxes/box", json={"sleep_after": 3}) as response,
        ):
            assert response.status == 200
        async with asyncio.timeout(20):
            await server.state.drain.started.wait()
        (info,) = await server.state.host.list()
        assert (info.status, info.stop_reason) == ("idle", "it fell asleep")


async def test_log_has_a_line_per_request_without_secrets(tmp_path: Path) -> None:
    async with run_server_process(tmp_path / "home", keys=True) as server:
        secret = "f" * 64
        headers = {"authorization": f"Bearer sbx_{'0' * 12}_{secret}", "x-request-id": "mine"}
        assert (await server.json("GET", "/api/sandboxes/box", headers=headers))[0] == 401
        assert (await server.json("GET", f"/api/health?token={secret}"))[0] == 200
        assert (await server.json("GET", "/api/%1b%5bA%0ax"))[0] == 401
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await server.http.ws_connect(f"/api/x?authorization=Bearer%20{secret}&token={secret}")
        server.process.send_signal(signal.SIGTERM)
        _, log = await server.wait()
    lines = [json.loads(line) for line in log.splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (line["event"], line["level"], line["status"]) == ("request", "info", 401)
    assert (line["method"], line["path"], line["principal"]) == (
        "GET",
        "/api/sandboxes/box",
        "anonymous",
    )
    assert line["ms"] >= 0
    assert "'/api/\\x1b[A\\nx'" in [line.get("path") for line in lines]
    assert secret not in log


async def _wait_for_file(server: ServerProcess, name: str) -> None:
    path = f"/api/sandboxes/box/files/exists?path=/workspace/{name}"
    async with asyncio.timeout(20):
        while not (await server.json("GET", path))[1].get("exists"):
            await asyncio.sleep(0.02)


async def _stop_sandboxes(home: Path) -> None:
    """Stop the sandboxes that a server left running."""
    async with run_server(ServerSettings(home=str(home), pool=0)):
        pass
