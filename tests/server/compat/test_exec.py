"""Commands over the bridge protocol."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.compat.bridge_client import BridgeClient
    from smokebox.server.server import RunningServer


async def test_output_and_exit_code_are_events(bridge: BridgeClient) -> None:
    result = await bridge.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert (result.last, result.data) == ("exit", {"exit_code": 3})


async def test_arguments_are_not_interpreted_by_a_shell(bridge: BridgeClient) -> None:
    arguments = ["a b", "$HOME", "'", '"', "\n", "", "*", ";", "ä"]
    assert await bridge.output("printf", "%s|", *arguments) == "".join(
        f"{argument}|" for argument in arguments
    )


async def test_binary_output_is_unchanged(bridge: BridgeClient) -> None:
    result = await bridge.run("bash", "-c", r"printf '\xff\x00\xc3('; printf '\xe2\x82' >&2")
    assert (result.stdout, result.stderr) == (b"\xff\x00\xc3(", b"\xe2\x82")


async def test_events_never_split_a_character(bridge: BridgeClient) -> None:
    script = "import sys\nfor _ in range(200_000): sys.stdout.write('ä€😀')"
    result = await bridge.run("python3", "-c", script)
    assert len(result.pieces) > 1
    assert "".join(piece.decode() for piece in result.pieces) == "ä€😀" * 200_000


async def test_missing_program_is_exit_code_127(bridge: BridgeClient) -> None:
    result = await bridge.run("no-such-program")
    assert (result.last, result.data) == ("exit", {"exit_code": 127})
    assert b"no-such-program" in result.stderr


async def test_commands_start_in_the_workspace_and_keep_no_state(bridge: BridgeClient) -> None:
    assert await bridge.output("pwd") == "/workspace\n"
    await bridge.output("mkdir", "-p", "sub dir")
    for cwd in ("/workspace/sub dir", "sub dir", "/workspace/./x/../sub dir/"):
        assert await bridge.output("pwd", cwd=cwd) == "/workspace/sub dir\n"
    assert await bridge.output("pwd") == "/workspace\n"


async def test_removed_workspace_is_created_again(bridge: BridgeClient) -> None:
    await bridge.output("rm", "-rf", "/workspace", cwd="/workspace")
    assert await bridge.output("sh", "-c", "mkdir -p -- /workspace && pwd") == "/workspace\n"


async def test_environment_is_passed_through_env(bridge: BridgeClient) -> None:
    assert await bridge.output("env", "A=1 2", "printenv", "A") == "1 2\n"


async def test_timeout_kills_the_process_tree_and_is_exit_code_124(bridge: BridgeClient) -> None:
    script = "trap '' TERM; printf partly; (trap '' TERM; sleep 1313) & sleep 1313"
    # Creating the sandbox takes long on a busy machine, and is not measured here.
    await bridge.output("true")
    started = time.monotonic()
    result = await bridge.run("bash", "-c", script, timeout_ms=300)
    # The client times out five seconds after `timeout_ms`.
    assert time.monotonic() - started < 0.3 + 4
    assert (result.stdout, result.last, result.data) == (b"partly", "exit", {"exit_code": 124})
    await _wait_until_ended(bridge, "sleep 1313")


async def test_disconnect_kills_the_command(bridge: BridgeClient) -> None:
    body = {"argv": ["bash", "-c", "echo on; sleep 1414 & sleep 1414"]}
    async with bridge.request("POST", "/exec", json=body) as response:
        await response.content.readuntil(b"\n\n")
    await _wait_until_ended(bridge, "sleep 1414")


async def test_disconnect_with_unread_output_kills_the_command(bridge: BridgeClient) -> None:
    async with bridge.request("POST", "/exec", json={"argv": ["yes", "1515"]}) as response:
        await response.content.readuntil(b"\n\n")
        # Until all buffers between the command and the client are full.
        await _wait_until_blocked(bridge, "yes 1515")
    await _wait_until_ended(bridge, "yes 1515")


async def test_unknown_session_is_created_and_keeps_state(bridge: BridgeClient) -> None:
    for session in ("one", "-odd.name"):
        await bridge.output("mkdir", "--", session)
        await bridge.output("cd", "--", session, session=session)
        await bridge.output("export", "A=1", session=session)
        assert await bridge.output("pwd", session=session) == f"/workspace/{session}\n"
        assert await bridge.output("printenv", "A", session=session) == "1\n"
    assert await bridge.output("pwd", session="two") == "/workspace\n"


async def test_sessions_are_created_and_deleted(bridge: BridgeClient) -> None:
    await bridge.output("mkdir", "sub")
    created = await bridge.request(
        "POST", "/session", json={"id": "s", "cwd": "sub", "env": {"A": "1"}}
    )
    assert (created.status, await created.json()) == (200, {"id": "s"})
    assert await bridge.output("sh", "-c", "echo $A $PWD", session="s") == "1 /workspace/sub\n"
    again = await bridge.request_error("POST", "/session", json={"id": "s"})
    assert again[:2] == (409, "session_error")
    deleted = await bridge.request("DELETE", "/session/s")
    body = await deleted.json()
    assert (deleted.status, body["success"], body["sessionId"]) == (200, True, "s")
    assert "timestamp" in body
    assert (await bridge.request_error("DELETE", "/session/s"))[:2] == (404, "session_error")
    assert await bridge.output("sh", "-c", "echo $A $PWD", session="s") == "/workspace\n"


async def test_session_without_an_id_gets_a_random_one(bridge: BridgeClient) -> None:
    created = await (await bridge.request("POST", "/session")).json()
    assert await bridge.output("pwd", session=created["id"]) == "/workspace\n"


async def test_invalid_bodies_are_refused(bridge: BridgeClient) -> None:
    for body, status, message in (
        (b"not json", 400, "Invalid JSON body"),
        (b"", 400, "argv must be a non-empty array"),
        (b"{}", 400, "argv must be a non-empty array"),
        (b'{"argv": []}', 400, "argv must be a non-empty array"),
        (b'{"argv": "ls"}', 400, "argv"),
        (b'{"argv": ["ls"], "timeout_ms": 0}', 400, "timeout_ms"),
        (b'{"argv": ["ls"], "timeout_ms": -5}', 400, "timeout_ms"),
        (b'{"argv": ["ls"], "timeout_ms": "1"}', 400, "timeout_ms"),
        (b'{"argv": ["ls"], "cwd": "/tmp"}', 403, "within /workspace"),
        (b'{"argv": ["ls"], "cwd": "/workspace/../../etc"}', 403, "within /workspace"),
        (b'{"argv": ["ls"], "cwd": "/workspacex"}', 403, "within /workspace"),
    ):
        response = await bridge.request_error("POST", "/exec", data=body)
        assert response[:2] == (status, "invalid_request")
        assert message in response[2]
    assert not await bridge.running()


async def test_cwd_outside_the_workspace_by_symlink_is_refused(bridge: BridgeClient) -> None:
    await bridge.output("ln", "-s", "/etc", "out")
    response = await bridge.request_error("POST", "/exec", json={"argv": ["ls"], "cwd": "out"})
    assert response[:2] == (403, "invalid_request")


async def test_missing_cwd_ends_the_stream_with_an_error(bridge: BridgeClient) -> None:
    result = await bridge.run("ls", cwd="missing")
    assert (result.last, result.data["code"]) == ("error", "exec_error")
    assert "missing" in result.data["error"]


async def test_invalid_program_names_end_the_stream_with_an_error(bridge: BridgeClient) -> None:
    for name in ("a\0b", ""):
        result = await bridge.run(name)
        assert (result.last, result.data["code"]) == ("error", "exec_error")


async def test_invalid_session_ids_are_refused(bridge: BridgeClient) -> None:
    for method, path in (
        ("POST", "/exec"),
        ("GET", "/file/workspace/a"),
        ("DELETE", "/session/a b"),
    ):
        body = {"argv": ["true"]} if method == "POST" else None
        response = await bridge.request_error(
            method, path, headers={"Session-Id": "a..b"}, json=body
        )
        assert response == (400, "invalid_request", "Invalid session ID format")


async def test_destroyed_sandbox_ends_the_stream_with_an_error(
    bridge: BridgeClient, server: RunningServer
) -> None:
    running = asyncio.create_task(bridge.run("bash", "-c", "echo on; sleep 1616"))
    sandbox = server.state.host.sandbox("box")
    async with asyncio.timeout(10):
        while not (await sandbox.exec(["pgrep", "-xf", "sleep 1616"])).success:
            await asyncio.sleep(0.02)
    await sandbox.destroy()
    result = await running
    assert (result.stdout, result.last, result.data["code"]) == (
        b"on\n",
        "error",
        "exec_transport_error",
    )


async def _wait_until_blocked(bridge: BridgeClient, command: str) -> None:
    """Wait until a program uses no CPU time."""
    used = "cat /proc/$(pgrep -xf \"$1\")/stat | cut -d ' ' -f 14,15"
    before = ""
    async with asyncio.timeout(10):
        while (now := await bridge.output("sh", "-c", used, "sh", command)) != before:
            before = now
            await asyncio.sleep(0.1)


async def _wait_until_ended(bridge: BridgeClient, command: str) -> None:
    async with asyncio.timeout(10):
        while (await bridge.run("pgrep", "-xf", command)).data["exit_code"] == 0:
            await asyncio.sleep(0.02)
