"""Handles of sandboxes: lazy, cheap, usable from any loop and thread, with settings by class."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from smokebox import (
    Limits,
    ProcessLimits,
    Sandbox,
    SandboxApi,
    VirtualLimits,
    get_sandbox,
    list_sandboxes,
)
from smokebox.client.client import Client, connect
from smokebox.errors import Conflict, InvalidOption, NotFound, PathNotFound

if TYPE_CHECKING:
    from client.server_process import ServerProcess


class Small(Sandbox):
    cwd = "/tmp"
    limits = "lite"
    labels: ClassVar = {"team": "search"}

    async def here(self) -> str:
        return (await self.exec("pwd")).stdout.strip()


@pytest.fixture
def default(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the server the default one."""
    monkeypatch.setenv("SMOKEBOX_URL", server.url)


async def test_sandbox_is_created_by_the_first_call(client: Client) -> None:
    sandbox = client.sandbox("lazy")
    assert await sandbox.info() is None
    await sandbox.exec("true")
    info = await sandbox.info()
    assert info is not None
    assert info.status == "active"
    await sandbox.destroy()
    assert await sandbox.info() is None


def test_handle_satisfies_the_contract(client: Client) -> None:
    assert isinstance(client.sandbox("any"), SandboxApi)


async def test_created_sandbox_is_destroyed_at_the_end_of_its_block(client: Client) -> None:
    async with await client.create(labels={"for": "block"}) as sandbox:
        assert [one.id for one in await client.list(labels={"for": "block"})] == [sandbox.id]
    assert await client.list(labels={"for": "block"}) == []


async def test_sandbox_by_id_outlives_its_block(client: Client) -> None:
    async with client.sandbox("stays") as sandbox:
        await sandbox.write_file("kept", "here")
    assert await client.sandbox("stays").read_file("kept") == "here"
    await sandbox.destroy()


async def test_destroyed_sandbox_is_created_again_by_the_next_call(client: Client) -> None:
    mine, other = client.sandbox("shared"), client.sandbox("shared")
    await mine.write_file("file", "x")
    await other.destroy()
    assert not await mine.exists("file")
    await other.destroy()
    with pytest.raises(PathNotFound):
        await mine.read_bytes("file")
    await other.destroy()
    async with mine.exec_stream("echo again") as stream:
        assert [chunk.data async for chunk in stream] == ["again\n"]
    await other.destroy()


async def test_limits_accept_a_value_a_name_or_a_mapping(client: Client) -> None:
    exact = Limits(memory="2GiB", pids=200)
    async with await client.create(limits=exact) as sandbox:
        info = await sandbox.info()
        assert info is not None
        assert info.limits == exact.to_json()
        info = await sandbox.update(limits="lite")
        assert info.limits["memory"] == 256 << 20
        info = await sandbox.update(limits={"memory": "1GiB"})
        assert info.limits["memory"] == 1 << 30


async def test_exec_takes_process_limits(client: Client) -> None:
    async with await client.create() as sandbox:
        result = await sandbox.exec("ulimit -n", limits=ProcessLimits(open_files=77))
        assert result.stdout == "77\n"


async def test_attributes_of_a_subclass_are_settings(default: None) -> None:
    async with await Small.create() as small:
        assert (await small.here(), small.cwd) == ("/tmp", "/tmp")
        info = await small.info()
        assert info is not None
        assert info.labels == {"team": "search"}
        assert (await Small.get(small.id).here()) == "/tmp"
        assert isinstance(get_sandbox(Small, small.id), Small)


async def test_keywords_override_settings_of_the_class(client: Client) -> None:
    small = client.sandbox(Small, "over", cwd="/usr", labels={})
    assert await small.here() == "/usr"
    info = await small.info()
    assert info is not None
    assert info.labels == {}
    await small.destroy()


def test_settings_of_a_class_are_inherited_and_overridden() -> None:
    class Smaller(Small):
        cwd = "/usr"

    assert Smaller._declared == {**Small._declared, "cwd": "/usr"}


@pytest.mark.parametrize("name", ["limit", "imag", "keepalive"])
def test_unknown_attribute_names_the_nearest_setting(name: str) -> None:
    with pytest.raises(InvalidOption, match=r"class Odd has no option .* Did you mean"):
        type("Odd", (Sandbox,), {name: "x"})


def test_private_attributes_and_methods_are_not_settings() -> None:
    kind = type("Own", (Sandbox,), {"_LIMIT": 3, "helper": lambda self: 1, "image": "host"})
    assert kind._declared == {"image": "host"}  # type: ignore[attr-defined]


def test_unknown_setting_is_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'image'"):
        client.sandbox("box", imag="host")  # type: ignore[call-overload]


def test_setting_of_a_wrong_type_is_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidOption) as caught:
        client.sandbox("box", keep_alive="yes")  # type: ignore[call-overload]
    assert caught.value.option == "keep_alive"


def test_virtual_limits_are_refused_with_the_right_class_in_the_hint(client: Client) -> None:
    with pytest.raises(InvalidOption, match="Limits\\(memory"):
        client.sandbox("box", limits=VirtualLimits())  # type: ignore[call-overload]


@pytest.mark.parametrize("id", ["", "a/b", None, 7])
def test_invalid_id_is_refused_at_once(client: Client, id: object) -> None:
    with pytest.raises(InvalidOption):
        client.sandbox(Sandbox, id)  # type: ignore[call-overload]


@pytest.mark.parametrize("command", [None, 7, b"ls", [], [""], ["ls", 1], {"ls": 1}])
async def test_invalid_command_is_refused_at_once(client: Client, command: Any) -> None:
    sandbox = client.sandbox("box")
    for call in (sandbox.exec, sandbox.start_process, sandbox.create_terminal):
        if command is None and call == sandbox.create_terminal:
            continue
        with pytest.raises(InvalidOption) as caught:
            await call(command)
        assert caught.value.option == "command"
    with pytest.raises(InvalidOption):
        sandbox.exec_stream(command)


@pytest.mark.parametrize("env", ["A=1", ["A"], {"A": 1}, {"A=B": "c"}])
async def test_invalid_environment_is_refused_at_once(client: Client, env: Any) -> None:
    sandbox = client.sandbox("box")
    for call in (sandbox.exec, sandbox.start_process, sandbox.create_terminal):
        with pytest.raises(InvalidOption) as caught:
            await call("true", env=env)
        assert caught.value.option == "env"
    with pytest.raises(InvalidOption):
        await sandbox.create_session(env=env)


async def test_server_refuses_an_invalid_id(client: Client) -> None:
    for id in ("..", "Upper", "a b", "api", "ü"):
        with pytest.raises(InvalidOption) as caught:
            await client.sandbox(id).exec("true")
        assert caught.value.option == "id"


def test_local_command_does_not_import_aiohttp(server: ServerProcess) -> None:
    """The import takes a quarter of a second, ten times as long as the command."""
    script = (
        "import sys\n"
        "from smokebox.sync import connect\n"
        "with connect() as client, client.create() as sandbox:\n"
        "    sandbox.exec('true')\n"
        "print('aiohttp' in sys.modules)"
    )
    env = {**os.environ, "SMOKEBOX_URL": server.url}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


async def test_settings_are_changed_by_update_and_by_another_handle(client: Client) -> None:
    sandbox = client.sandbox("change", labels={"a": "1"})
    await sandbox.exec("true")
    assert (await sandbox.update(sleep_after="2m")).sleep_after == 120
    info = await client.sandbox("change", labels={"b": "2"}).wake()
    assert (info.labels, info.sleep_after) == ({"b": "2"}, 120)
    with pytest.raises(Conflict):
        await sandbox.update(image="dir:elsewhere")
    await sandbox.destroy()


async def test_sleep_and_wake_keep_files(client: Client) -> None:
    sandbox = client.sandbox("sleeper")
    await sandbox.write_file("kept", "here")
    assert (await sandbox.sleep()).status == "idle"
    assert (await sandbox.stats()).pids is None
    assert (await sandbox.wake()).status == "active"
    assert await sandbox.read_file("kept") == "here"
    assert (await sandbox.capabilities()).sandbox == "linux"
    await sandbox.destroy()


async def test_sandboxes_are_listed_by_prefix_and_status(default: None, client: Client) -> None:
    for id in ("list-a", "list-b"):
        await client.sandbox(id).wake()
    await client.sandbox("list-b").sleep()
    assert [one.id for one in await list_sandboxes(prefix="list-")] == ["list-a", "list-b"]
    assert [one.id for one in await client.list(prefix="list-", status="idle")] == ["list-b"]
    for id in ("list-a", "list-b"):
        await client.sandbox(id).destroy()


async def test_concurrent_calls_create_the_sandbox_once(client: Client) -> None:
    sandbox = client.sandbox("rush")
    results = await asyncio.gather(*(sandbox.exec(f"echo {n}") for n in range(20)))
    assert [one.stdout for one in results] == [f"{n}\n" for n in range(20)]
    info = await sandbox.info()
    assert info is not None
    assert info.generation == 1
    await sandbox.destroy()


def test_handle_works_on_several_loops_and_threads(server: ServerProcess) -> None:
    sandbox = connect(server.url).sandbox("loops")
    outputs: list[str] = []

    def run(n: int) -> None:
        outputs.append(asyncio.run(_echo(sandbox, n)))

    run(0)
    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert sorted(outputs) == ["0\n", "1\n", "2\n", "3\n"]
    asyncio.run(sandbox.destroy())


async def test_cancelling_exec_kills_the_command(client: Client) -> None:
    async with await client.create() as sandbox:
        running = asyncio.create_task(sandbox.exec("exec sleep 985"))
        async with asyncio.timeout(10):
            while not (await sandbox.exec("pgrep -f 'sleep 98[5]'")).stdout:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            while (await sandbox.exec("pgrep -f 'sleep 98[5]'")).stdout:
                await asyncio.sleep(0.01)


async def test_stdin_is_text_or_bytes(client: Client) -> None:
    async with await client.create() as sandbox:
        assert (await sandbox.exec("cat", stdin="ü")).stdout == "ü"
        await sandbox.exec("cat > raw", stdin=b"\xff\x00")
        assert await sandbox.read_bytes("raw") == b"\xff\x00"


async def test_stdin_may_be_longer_than_a_request(client: Client) -> None:
    async with await client.create() as sandbox:
        big = b"\x00" * (20 << 20)
        expected = f"{len(big)}\n"
        assert (await sandbox.exec("wc -c", stdin=big)).stdout == expected
        assert (await sandbox.exec(["wc", "-c"], stdin=big.decode())).stdout == expected
        async with sandbox.exec_stream("wc -c", stdin=big) as stream:
            assert [chunk.data async for chunk in stream] == [expected]
        assert await sandbox.glob("/tmp/*", hidden=True) == []


async def test_run_passes_arguments_without_a_shell(client: Client) -> None:
    async with await client.create() as sandbox:
        result = await sandbox.run("printf", ["%s|", "a b", "$HOME"], env={"X": "1"})
        assert result.stdout == "a b|$HOME|"


async def test_remote_error_has_its_class_fields_and_request_id(client: Client) -> None:
    async with await client.create() as sandbox:
        with pytest.raises(NotFound) as caught:
            await sandbox.exec("true", session="missing")
        assert (caught.value.kind, caught.value.name) == ("session", "missing")
        assert caught.value.fields["request_id"]
        with pytest.raises(PathNotFound) as missing:
            await sandbox.read_file("/none")
        assert missing.value.path == "/none"


async def test_keys_are_created_listed_and_revoked(client: Client) -> None:
    key = await client.keys.create("ci", prefix="ci-")
    assert key.key
    assert [one.name for one in await client.keys.list()] == ["ci"]
    details = await client.keys.get(key.id)
    assert (details.profile, details.quotas[0].used) == ("default", 0)
    await client.keys.revoke(key.id)
    assert await client.keys.list() == []


async def _echo(sandbox: Sandbox, n: int) -> str:
    return (await sandbox.exec(f"echo {n}")).stdout


async def test_lifetime_ends_a_sandbox_of_its_block(client: Client) -> None:
    async with await client.create(lifetime="1h") as sandbox:
        info = await sandbox.info()
        assert info is not None
        assert info.expires_at == info.created_at + 3600
        await sandbox.write_file("file", "data")
        changed = await sandbox.update(lifetime=time.time() - info.created_at + 0.5)
        assert changed.expires_at is not None
        async with asyncio.timeout(10):
            while await sandbox.info() is not None:
                await asyncio.sleep(0.05)
        # As after destroy(), the next call makes an empty one, with the settings of the handle.
        assert await sandbox.readdir("/workspace") == []


async def test_lifetime_of_a_handle_counts_again_for_the_next_sandbox(client: Client) -> None:
    sandbox = client.sandbox("brief", lifetime="1h")
    await sandbox.write_file("file", "data")
    first = await sandbox.info()
    assert first is not None
    await client.sandbox("brief").update(lifetime=time.time() - first.created_at + 0.5)
    async with asyncio.timeout(10):
        while await sandbox.info() is not None:
            await asyncio.sleep(0.05)
    assert await sandbox.readdir("/workspace") == []
    second = await sandbox.info()
    assert second is not None
    assert second.expires_at == second.created_at + 3600
    await sandbox.destroy()
