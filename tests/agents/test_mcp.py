"""Tests of MCP tools, with servers of the MCP library over real pipes and HTTP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agents.mcp_server import PNG
from client.server_process import ServerProcess, server_process
from smokebox import create_agent, init, local, virtual
from smokebox.agents.events import ToolEnd
from smokebox.agents.tools import Tool, ToolContext
from smokebox.agents.tools.mcp import MCPClient, MCPServer, mcp_tools
from smokebox.client.client import connect
from smokebox.errors import Conflict, InvalidOption, ServiceUnavailable, Unsupported
from smokebox.testing.scripted import ScriptedModel, call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox import OutputChunk

# Importing the library takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(120)
SCRIPT = str(Path(__file__).parent / "mcp_server.py")
STDIO = [sys.executable, SCRIPT, "stdio"]
TIMEOUT = 60.0


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    return {tool.name.partition("__")[2]: tool for tool in tools}


async def text(tool: Tool, **arguments: object) -> str:
    result = await tool.run(arguments)
    assert not result.is_error, result.text
    return result.text


@contextmanager
def http_server(port: int = 0, token: str = "") -> Iterator[int]:
    """Run an HTTP server, on any free port by default, and return its port."""
    env = {**os.environ, "TOKEN": token}
    command = [sys.executable, SCRIPT, "http", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server that all tests of this module share."""
    with http_server(token="right") as port:
        yield port


def over_http(port: int, **options: Any) -> MCPServer:
    options = {"token": "right", "connect_timeout": TIMEOUT, **options}
    return MCPServer(name="t", url=f"http://127.0.0.1:{port}/mcp", **options)


async def test_stdio_server_restarts_after_crash(tmp_path: Path) -> None:
    server = MCPServer(
        name="t",
        command=STDIO,
        env={"COLOUR": "red"},
        cwd=str(tmp_path),
        connect_timeout=TIMEOUT,
    )
    async with mcp_tools(server) as tools:
        found = by_name(tools)
        assert found["add"].name == "t__add"
        assert found["add"].description == "Add two numbers."
        assert found["add"].parameters["required"] == ["a"]
        assert await text(found["add"], a=2, b=3) == "5"
        pid, cwd, colour = (await text(found["about"])).split(" ")
        assert (Path(cwd), colour) == (tmp_path, "red")
        died = await found["die"].run({})
        assert died.is_error
        assert "ended while the call ran" in died.text
        assert "Its last error: out of memory." in died.text
        # The next call starts another process.
        other, _, _ = (await text(found["about"])).split(" ")
        assert other != pid
    assert not Path(f"/proc/{other}").exists()


async def test_content_of_all_kinds_is_shown(port: int) -> None:
    async with mcp_tools(over_http(port)) as tools:
        found = by_name(tools)
        picture = await found["picture"].run({})
        assert [(i.media_type, i.data) for i in picture.images] == [("image/png", PNG)]
        assert await text(found["resource"]) == "words\n\nmemo://1:\ninside"
        assert await text(found["files_read_all"]) == "read"
        async with virtual() as sandbox:
            long = await found["long"].run({}, ctx=ToolContext(sandbox=sandbox))
            assert "of 200000 bytes. The output is in /tmp/" in long.text


async def test_errors_become_results(port: int) -> None:
    async with mcp_tools(over_http(port)) as tools:
        found = by_name(tools)
        for name, arguments, expected in (
            ("fail", {}, "the disk is full"),
            ("refuse", {}, "t__refuse: not today"),
            ("add", {"a": "x"}, "'a' must be an integer"),
        ):
            result = await found[name].run(arguments)
            assert result.is_error
            assert expected in result.text
        assert await text(found["add"], a=1) == "2"


async def test_timed_out_call_is_cancelled_on_the_server(port: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    seen: list[OutputChunk] = []
    async with mcp_tools(over_http(port, timeout=0.5)) as tools:
        slow = by_name(tools)["slow"]
        result = await slow.run({"marker": str(marker)}, on_output=seen.append)
        assert (result.is_error, result.timed_out) == (True, True)
        async with asyncio.timeout(30):
            while not marker.exists():
                await asyncio.sleep(0.01)
    assert [chunk.data for chunk in seen] in ([], ["1/3 step\n"])


async def test_connection_is_usable_after_cancelled_call(port: int, tmp_path: Path) -> None:
    async with mcp_tools(over_http(port)) as tools:
        found = by_name(tools)
        started = asyncio.Event()
        arguments = {"marker": str(tmp_path / "marker")}
        running = asyncio.create_task(
            found["slow"].run(arguments, on_output=lambda chunk: started.set())
        )
        await asyncio.wait_for(started.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await text(found["add"], a=1) == "2"


async def test_calls_run_concurrently(port: int) -> None:
    async with mcp_tools(over_http(port)) as tools:
        add = by_name(tools)["add"]
        assert await asyncio.gather(*(text(add, a=n) for n in range(20))) == [
            str(n + 1) for n in range(20)
        ]


async def test_client_reconnects_to_restarted_server() -> None:
    with http_server() as port:
        client = MCPClient(over_http(port))
        add = by_name(await client.tools())["add"]
    # Another process, which does not know the session.
    with http_server(port):
        assert await text(add, a=1) == "2"
    # No server listens: nothing was sent.
    gone = await add.run({"a": 1})
    assert gone.is_error
    assert "cannot be reached" in gone.text
    await client.aclose()
    await client.aclose()
    assert "was closed" in (await add.run({"a": 1})).text


async def test_refused_token_is_fetched_again(port: int) -> None:
    fetched: list[str] = []

    async def token() -> str:
        fetched.append("stale" if not fetched else "right")
        return fetched[-1]

    async with mcp_tools(over_http(port, token=token, tools=["ad*"])) as tools:
        assert [tool.name for tool in tools] == ["t__add"]
        assert await text(tools[0], a=1) == "2"
    assert fetched[0] == "stale"
    assert set(fetched[1:]) == {"right"}


async def test_headers_are_sent_with_each_request(port: int) -> None:
    server = over_http(port, token=None, headers={"Authorization": "Bearer right"})
    async with mcp_tools(server) as tools:
        assert len(tools) > 5


async def test_error_for_wrong_token_has_the_status(port: int) -> None:
    with pytest.raises(ServiceUnavailable, match="HTTP 401"):
        async with mcp_tools(over_http(port, token="wrong")):
            pass


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["no-such-program-anywhere"], "No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('no such database')"], "no such database"),
    ],
    ids=["missing", "crashing"],
)
async def test_error_for_failed_command_has_the_reason(command: list[str], expected: str) -> None:
    server = MCPServer(name="t", command=command, connect_timeout=TIMEOUT)
    with pytest.raises(ServiceUnavailable, match="'t' cannot be reached") as caught:
        async with mcp_tools(server):
            pass
    assert expected in caught.value.message


async def test_silent_command_is_killed_after_connect_timeout(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    script = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    server = MCPServer(name="t", command=[sys.executable, "-c", script], connect_timeout=1.0)
    with pytest.raises(ServiceUnavailable, match="did not respond in time"):
        async with mcp_tools(server):
            pass
    if marker.exists():
        assert not Path(f"/proc/{marker.read_text()}").exists()


async def test_url_without_server_is_unavailable() -> None:
    server = MCPServer(name="t", url="http://127.0.0.1:1/mcp")
    with pytest.raises(ServiceUnavailable, match="cannot be reached"):
        async with mcp_tools(server):
            pass


# A server without the library, which a sandbox does not have.
SMALL = """
import json, os, sys
for line in sys.stdin:
    fetched = json.loads(line)
    if "id" not in fetched:
        continue
    response = {"jsonrpc": "2.0", "id": fetched["id"]}
    if fetched["method"] == "initialize":
        response["result"] = {
            "protocolVersion": fetched["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "small", "version": "1"},
        }
    elif fetched["method"] == "tools/list":
        schema = {"type": "object", "properties": {"word": {"type": "string"}}}
        response["result"] = {"tools": [{"name": "echo", "inputSchema": schema}]}
    elif fetched["method"] == "tools/call":
        word = fetched["params"]["arguments"]["word"]
        if word == "die":
            sys.stderr.write("killed by a word\\n")
            os._exit(1)
        text = f"{word} {os.getcwd()} {os.environ.get('COLOUR')}"
        response["result"] = {"content": [{"type": "text", "text": text}]}
    else:
        response["error"] = {"code": -32601, "message": "what?"}
    print(json.dumps(response), flush=True)
"""


def in_sandbox(**options: Any) -> MCPServer:
    options = {"connect_timeout": TIMEOUT, "env": {"COLOUR": "blue"}, **options}
    return MCPServer(name="t", command=["python3", "small.py"], in_sandbox=True, **options)


async def check_in_sandbox(tools: list[Tool], cwd: str) -> None:
    [echo] = tools
    assert await text(echo, word="æ" * 3) == f"æææ {cwd} blue"
    died = await echo.run({"word": "die"})
    assert "killed by a word" in died.text
    assert await text(echo, word="again") == f"again {cwd} blue"


@pytest.fixture(scope="module")
def linux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for Linux sandboxes."""
    with server_process(str(tmp_path_factory.mktemp("linux"))) as server:
        yield server


async def test_server_runs_in_linux_sandbox(linux: ServerProcess) -> None:
    async with connect(linux.url) as client, await client.create() as sandbox:
        await sandbox.mkdir("app")
        await sandbox.write_file("app/small.py", SMALL)
        async with mcp_tools(in_sandbox(cwd="app"), sandbox=sandbox) as tools:
            await check_in_sandbox(tools, f"{sandbox.cwd}/app")
            assert [p.running for p in await sandbox.list_processes()].count(True) == 1
        assert not any(p.running for p in await sandbox.list_processes())


async def test_server_runs_in_local_sandbox(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    async with (
        local(cwd=tmp_path) as sandbox,
        mcp_tools(in_sandbox(), sandbox=sandbox) as tools,
    ):
        await check_in_sandbox(tools, str(tmp_path))


async def test_server_starts_in_the_agents_cwd(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "small.py").write_text(SMALL)
    agent = create_agent(
        model=ScriptedModel(call("t__echo", word="hi"), "Done."),
        sandbox=local(cwd=tmp_path),
        cwd="app",
        tools=[in_sandbox()],
        persist=False,
    )
    async with await init(agent) as harness:
        session = await harness.session()
        ends = [e async for e in session.prompt("Go.") if isinstance(e, ToolEnd)]
    assert [end.text for end in ends] == [f"hi {tmp_path}/app blue"]


async def test_sandbox_without_processes_is_refused() -> None:
    async with virtual() as sandbox:
        with pytest.raises(Unsupported, match="has no processes"):
            async with mcp_tools(in_sandbox(), sandbox=sandbox):
                pass


async def test_two_servers_with_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    async with local(cwd=tmp_path) as sandbox:
        with pytest.raises(Conflict, match="t__echo"):
            async with mcp_tools(in_sandbox(), in_sandbox(), sandbox=sandbox):
                pass


ENDLESS = SMALL.replace('{"tools": [', '{"nextCursor": "more", "tools": [')


async def test_endless_list_of_tools_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(ENDLESS)
    async with local(cwd=tmp_path) as sandbox:
        with pytest.raises(ServiceUnavailable, match="has no end"):
            async with mcp_tools(in_sandbox(), sandbox=sandbox):
                pass


async def test_long_tool_name_is_shortened(tmp_path: Path) -> None:
    name = "x" * 90
    (tmp_path / "small.py").write_text(SMALL.replace('"echo"', f'"{name}"'))
    async with (
        local(cwd=tmp_path) as sandbox,
        mcp_tools(in_sandbox(), sandbox=sandbox) as tools,
    ):
        assert len(tools[0].name) == 64
        assert await text(tools[0], word="a") == f"a {tmp_path} blue"


@pytest.mark.parametrize(
    "options",
    [
        {"name": "a b", "url": "http://x"},
        {"name": "a"},
        {"name": "a", "url": "http://x", "command": "y"},
        {"name": "a", "url": "ftp://x"},
        {"name": "a", "url": "http://x", "env": {"A": "b"}},
        {"name": "a", "url": "http://x", "in_sandbox": True},
        {"name": "a", "command": "y", "token": "secret"},
        {"name": "a", "command": "y", "headers": {"A": "secret"}},
        {"name": "a", "command": ""},
        {"name": "a", "command": "'y"},
        {"name": "a", "command": "y", "timeout": 0},
        {"name": "a", "command": "y", "tools": "add"},
        {"name": "a", "command": "y", "env": {"A=": "b"}},
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption) as caught:
        MCPServer(**options)
    assert "secret" not in str(caught.value)


def test_repr_hides_secrets() -> None:
    shown = repr(MCPServer(name="a", url="http://x", token="secret", headers={"A": "secret"}))
    assert "secret" not in shown


def test_missing_library_is_reported_on_first_use() -> None:
    script = """
import asyncio, sys
sys.modules["mcp"] = None
from smokebox.agents.tools.mcp import MCPServer, mcp_tools
from smokebox.errors import MissingDependency

async def main():
    try:
        async with mcp_tools(MCPServer(name="a", url="http://127.0.0.1:1")):
            pass
    except MissingDependency as error:
        assert "smokebox[mcp]" in str(error)
    else:
        raise AssertionError

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True)
