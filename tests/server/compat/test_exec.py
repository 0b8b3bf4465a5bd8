"""Commands over the bridge protocol, by plain HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.compat.bridge_client import Bridge
    from smokebox.server.server import RunningServer


async def test_output_and_exit_code_come_as_events(bridge: Bridge) -> None:
    done = await bridge.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    assert (done.last, done.data) == ("exit", {"exit_code": 3})


async def test_words_stay_words(bridge: Bridge) -> None:
    words = ["a b", "$HOME", "'", '"', "\n", "", "*", ";", "ä"]
    assert await bridge.out("printf", "%s|", *words) == "".join(f"{word}|" for word in words)


async def test_bytes_that_are_no_text_stay_what_they_are(bridge: Bridge) -> None:
    done = await bridge.run("bash", "-c", r"printf '\xff\x00\xc3('; printf '\xe2\x82' >&2")
    assert (done.stdout, done.stderr) == (b"\xff\x00\xc3(", b"\xe2\x82")


async def test_no_event_ends_inside_a_character(bridge: Bridge) -> None:
    script = "import sys\nfor _ in range(200_000): sys.stdout.write('ä€😀')"
    done = await bridge.run("python3", "-c", script)
    assert len(done.pieces) > 1
    assert "".join(piece.decode() for piece in done.pieces) == "ä€😀" * 200_000


async def test_a_command_that_is_not_there_is_a_result(bridge: Bridge) -> None:
    done = await bridge.run("no-such-program")
    assert (done.last, done.data) == ("exit", {"exit_code": 127})
    assert b"no-such-program" in done.stderr


async def test_a_command_starts_in_the_workspace_and_leaves_no_state(bridge: Bridge) -> None:
    assert await bridge.out("pwd") == "/workspace\n"
    await bridge.out("mkdir", "-p", "sub dir")
    for cwd in ("/workspace/sub dir", "sub dir", "/workspace/./x/../sub dir/"):
        assert await bridge.out("pwd", cwd=cwd) == "/workspace/sub dir\n"
    assert await bridge.out("pwd") == "/workspace\n"


async def test_the_workspace_is_there_again_after_it_was_removed(bridge: Bridge) -> None:
    await bridge.out("rm", "-rf", "/workspace", cwd="/workspace")
    assert await bridge.out("sh", "-c", "mkdir -p -- /workspace && pwd") == "/workspace\n"


async def test_env_arrives_as_its_clients_pass_it(bridge: Bridge) -> None:
    assert await bridge.out("env", "A=1 2", "printenv", "A") == "1 2\n"


async def test_a_timeout_kills_the_tree_and_is_a_result(bridge: Bridge) -> None:
    script = "trap '' TERM; printf partly; (trap '' TERM; sleep 1313) & sleep 1313"
    began = time.monotonic()
    done = await bridge.run("bash", "-c", script, timeout_ms=300)
    # The client's own timer is five seconds behind ours.
    assert time.monotonic() - began < 0.3 + 4
    assert (done.stdout, done.last, done.data) == (b"partly", "exit", {"exit_code": 124})
    await _gone(bridge, "sleep 1313")


async def test_who_leaves_kills(bridge: Bridge) -> None:
    body = {"argv": ["bash", "-c", "echo on; sleep 1414 & sleep 1414"]}
    async with bridge.ask("POST", "/exec", json=body) as answer:
        await answer.content.readuntil(b"\n\n")
    await _gone(bridge, "sleep 1414")


async def test_who_leaves_while_output_waits_for_them_kills(bridge: Bridge) -> None:
    async with bridge.ask("POST", "/exec", json={"argv": ["yes", "1515"]}) as answer:
        await answer.content.readuntil(b"\n\n")
        # Until all that is between us is full.
        await _still(bridge, "yes 1515")
    await _gone(bridge, "yes 1515")


async def test_a_session_remembers_and_is_made_when_unknown(bridge: Bridge) -> None:
    for session in ("one", "-odd.name"):
        await bridge.out("mkdir", "--", session)
        await bridge.out("cd", "--", session, session=session)
        await bridge.out("export", "A=1", session=session)
        assert await bridge.out("pwd", session=session) == f"/workspace/{session}\n"
        assert await bridge.out("printenv", "A", session=session) == "1\n"
    assert await bridge.out("pwd", session="two") == "/workspace\n"


async def test_sessions_are_made_and_deleted_by_name(bridge: Bridge) -> None:
    await bridge.out("mkdir", "sub")
    made = await bridge.ask("POST", "/session", json={"id": "s", "cwd": "sub", "env": {"A": "1"}})
    assert (made.status, await made.json()) == (200, {"id": "s"})
    assert await bridge.out("sh", "-c", "echo $A $PWD", session="s") == "1 /workspace/sub\n"
    again = await bridge.refused("POST", "/session", json={"id": "s"})
    assert again[:2] == (409, "session_error")
    deleted = await bridge.ask("DELETE", "/session/s")
    told = await deleted.json()
    assert (deleted.status, told["success"], told["sessionId"]) == (200, True, "s")
    assert "timestamp" in told
    assert (await bridge.refused("DELETE", "/session/s"))[:2] == (404, "session_error")
    assert await bridge.out("sh", "-c", "echo $A $PWD", session="s") == "/workspace\n"


async def test_a_session_without_a_name_gets_one(bridge: Bridge) -> None:
    made = await (await bridge.ask("POST", "/session")).json()
    assert await bridge.out("pwd", session=made["id"]) == "/workspace\n"


async def test_a_bad_body_is_refused(bridge: Bridge) -> None:
    for body, status, said in (
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
        answer = await bridge.refused("POST", "/exec", data=body)
        assert answer[:2] == (status, "invalid_request")
        assert said in answer[2]
    assert not await bridge.running()


async def test_a_cwd_that_a_link_leads_out_of_the_workspace_is_refused(bridge: Bridge) -> None:
    await bridge.out("ln", "-s", "/etc", "out")
    answer = await bridge.refused("POST", "/exec", json={"argv": ["ls"], "cwd": "out"})
    assert answer[:2] == (403, "invalid_request")


async def test_a_cwd_that_is_not_there_ends_the_stream_with_an_error(bridge: Bridge) -> None:
    done = await bridge.run("ls", cwd="missing")
    assert (done.last, done.data["code"]) == ("error", "exec_error")
    assert "missing" in done.data["error"]


async def test_words_that_no_program_can_have_are_an_error(bridge: Bridge) -> None:
    for word in ("a\0b", ""):
        done = await bridge.run(word)
        assert (done.last, done.data["code"]) == ("error", "exec_error")


async def test_a_bad_session_is_refused(bridge: Bridge) -> None:
    for method, path in (
        ("POST", "/exec"),
        ("GET", "/file/workspace/a"),
        ("DELETE", "/session/a b"),
    ):
        body = {"argv": ["true"]} if method == "POST" else None
        answer = await bridge.refused(method, path, headers={"Session-Id": "a..b"}, json=body)
        assert answer == (400, "invalid_request", "Invalid session ID format")


async def test_a_sandbox_that_goes_ends_the_stream_with_an_error(
    bridge: Bridge, server: RunningServer
) -> None:
    running = asyncio.create_task(bridge.run("bash", "-c", "echo on; sleep 1616"))
    sandbox = server.state.host.sandbox("box")
    async with asyncio.timeout(10):
        while not (await sandbox.exec(["pgrep", "-xf", "sleep 1616"])).success:
            await asyncio.sleep(0.02)
    await sandbox.destroy()
    done = await running
    assert (done.stdout, done.last, done.data["code"]) == (b"on\n", "error", "exec_transport_error")


async def _still(bridge: Bridge, command: str) -> None:
    """Wait until a program uses no more of the processor."""
    used = "cat /proc/$(pgrep -xf \"$1\")/stat | cut -d ' ' -f 14,15"
    before = ""
    async with asyncio.timeout(10):
        while (now := await bridge.out("sh", "-c", used, "sh", command)) != before:
            before = now
            await asyncio.sleep(0.1)


async def _gone(bridge: Bridge, command: str) -> None:
    async with asyncio.timeout(10):
        while (await bridge.run("pgrep", "-xf", command)).data["exit_code"] == 0:
            await asyncio.sleep(0.02)
