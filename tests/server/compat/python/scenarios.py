"""Scenarios with the unmodified client of OpenAI's Agents SDK for Python.

test_clients.py runs it as `python scenarios.py URL`, with CLOUDFLARE_SANDBOX_API_KEY and BUCKET
set. It is a separate program because its package `agents` has the name of a directory of tests.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.extensions.sandbox.cloudflare import (
    CloudflareBucketMountStrategy,
    CloudflareSandboxClient,
    CloudflareSandboxClientOptions,
)
from agents.items import ModelResponse
from agents.models.interface import Model
from agents.run import Runner
from agents.run_config import RunConfig, SandboxRunConfig
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, WorkspaceReadNotFoundError
from agents.sandbox.capabilities import Filesystem, Shell
from agents.sandbox.entries import Dir, File, S3Mount
from agents.sandbox.errors import InvalidManifestPathError, MountConfigError
from agents.usage import Usage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from agents.items import TResponseOutputItem, TResponseStreamEvent
    from agents.sandbox.session import SandboxSession

    Scenario = Callable[[CloudflareSandboxClientOptions], Coroutine[None, None, None]]

BINARY = bytes(range(256)) * 100
MANIFEST = Manifest(
    entries={
        "notes.txt": File(content=b"from the manifest\n"),
        "src": Dir(children={"main.py": File(content=b"print(6 * 7)\n")}),
    }
)


@asynccontextmanager
async def sandbox(options: CloudflareSandboxClientOptions) -> AsyncIterator[SandboxSession]:
    """Create a sandbox with a manifest."""
    client = CloudflareSandboxClient()
    session = await client.create(manifest=MANIFEST, options=options)
    async with session:
        yield session
    await client.delete(session)


async def read(session: SandboxSession, path: str) -> bytes:
    with await session.read(Path(path)) as file:
        return bytes(file.read())


async def commands_read_files_of_the_manifest(
    options: CloudflareSandboxClientOptions,
) -> None:
    async with sandbox(options) as session:
        done = await session.exec("cat notes.txt; python3 src/main.py; echo ä >&2; exit 3")
        assert (done.stdout, done.stderr) == (b"from the manifest\n42\n", "ä\n".encode())
        assert done.exit_code == 3


async def timeout_is_a_result(
    options: CloudflareSandboxClientOptions,
) -> None:
    async with sandbox(options) as session:
        done = await session.exec("printf partly; sleep 1818", timeout=1)
        assert (done.stdout, done.exit_code) == (b"partly", 124)


async def command_without_output_outlasts_heartbeats(
    options: CloudflareSandboxClientOptions,
) -> None:
    async with sandbox(options) as session:
        # Longer than the interval of the heartbeat.
        done = await session.exec("sleep 6; echo late")
        assert (done.stdout, done.exit_code) == (b"late\n", 0)


async def files_have_any_content_and_name(options: CloudflareSandboxClientOptions) -> None:
    async with sandbox(options) as session:
        for path in ("data.bin", "new/dir/a#b?c+d%41 ä.bin"):
            await session.mkdir(Path(path).parent, parents=True)
            await session.write(Path(path), io.BytesIO(BINARY))
            assert await read(session, path) == BINARY
        names = {Path(entry.path).name for entry in await session.ls(".")}
        assert names >= {"data.bin", "notes.txt", "new", "src"}
        await session.rm("new", recursive=True)
        try:
            await session.read(Path("new/dir"))
        except WorkspaceReadNotFoundError:
            return
        raise AssertionError("a missing file was read")


async def symlink_out_of_the_workspace_is_refused(options: CloudflareSandboxClientOptions) -> None:
    async with sandbox(options) as session:
        await session.exec("ln -s /etc/passwd out")
        try:
            await session.read(Path("out"))
        except InvalidManifestPathError:
            return
        raise AssertionError("a symlink out of the workspace was followed")


async def bucket_is_mounted_by_the_manifest(options: CloudflareSandboxClientOptions) -> None:
    bucket = json.loads(os.environ["BUCKET"])
    mount = S3Mount(
        bucket=bucket["bucket"],
        endpoint_url=bucket["endpoint"],
        access_key_id=bucket["access_key"],
        secret_access_key=bucket["secret_key"],
        prefix="from-python",
        read_only=False,
        mount_strategy=CloudflareBucketMountStrategy(),
    )
    client = CloudflareSandboxClient()
    manifest = Manifest(entries={**MANIFEST.entries, "data": mount})
    session = await client.create(manifest=manifest, options=options)
    async with session:
        done = await session.exec("echo kept > data/f && cat data/f && grep -c /data /proc/mounts")
        assert done.stdout == b"kept\n1\n", done
        assert await read(session, "data/f") == b"kept\n"
        inner: Any = session._inner
        await inner.unmount_bucket("/workspace/data")
        assert (await session.exec("ls data")).stdout == b""
        try:
            await inner.mount_bucket(bucket="b-b", mount_path="/workspace/b", options={})
        except MountConfigError as error:
            assert "no credentials" in str(error.context)
        else:
            raise AssertionError("a bucket was mounted without credentials")
        await inner.mount_bucket(
            bucket=bucket["bucket"],
            mount_path="/workspace/data",
            options={
                "endpoint": bucket["endpoint"],
                "credentials": {
                    "accessKeyId": bucket["access_key"],
                    "secretAccessKey": bucket["secret_key"],
                },
            },
        )
        assert await read(session, "data/from-python/f") == b"kept\n"
    await client.delete(session)


async def python_prompt_in_a_terminal(options: CloudflareSandboxClientOptions) -> None:
    async with sandbox(options) as session:
        started = await session.pty_exec_start(
            "python3", "-q", shell=False, tty=True, yield_time_s=1
        )
        assert started.process_id is not None
        output = b""
        await session.pty_write_stdin(
            session_id=started.process_id, chars="print('x' * 3 + str(6 * 7))\n", yield_time_s=0.3
        )
        for chars in ("print('y' * 3)\n", "exit()\n", "echo $TERM $PWD\n"):
            update = await session.pty_write_stdin(
                session_id=started.process_id, chars=chars, yield_time_s=1
            )
            output += update.output
        assert b"yyy\r\n" in output, output
        assert b"xterm-256color /workspace\r\n" in output, output
        ended = await session.pty_write_stdin(
            session_id=started.process_id, chars="exit 5\n", yield_time_s=10
        )
        assert (ended.exit_code, ended.process_id) == (5, None)


async def snapshot_survives_its_sandbox(options: CloudflareSandboxClientOptions) -> None:
    client = CloudflareSandboxClient()
    with tempfile.TemporaryDirectory() as directory:
        spec = LocalSnapshotSpec(base_path=Path(directory))
        session = await client.create(manifest=MANIFEST, snapshot=spec, options=options)
        await session.start()
        await session.mkdir("new")
        await session.write(Path("new/data.bin"), io.BytesIO(BINARY))
        await session.exec("ln -s data.bin new/link; chmod 750 new/data.bin; rm notes.txt")
        await session.stop()
        await client.delete(session)

        again = await client.resume(session.state)
        async with again:
            assert await read(again, "new/link") == BINARY
            done = await again.exec("stat -c %a new/data.bin; ls; python3 src/main.py")
            assert done.stdout == b"750\nnew\nsrc\n42\n", done
        await client.delete(again)


async def existing_sandbox_is_resumed(
    options: CloudflareSandboxClientOptions,
) -> None:
    client = CloudflareSandboxClient()
    session = await client.create(manifest=MANIFEST, options=options)
    await session.start()
    await session.exec("echo kept > kept; echo outside > /root/outside")
    await session.stop()
    again = await client.resume(session.state)
    async with again:
        done = await again.exec("cat kept /root/outside")
        assert done.stdout == b"kept\noutside\n", done
        assert await again.running()
    await client.delete(again)


class ScriptedModel(Model):
    """A model that returns scripted outputs, and records its inputs."""

    def __init__(self, *turns: list[TResponseOutputItem]) -> None:
        self.turns = list(turns)
        self.inputs: list[Any] = []

    async def get_response(
        self, system_instructions: Any, input: Any, *_: Any, **__: Any
    ) -> ModelResponse:
        self.inputs.append(input)
        return ModelResponse(output=self.turns.pop(0), usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


def tool_call(name: str, **arguments: Any) -> list[TResponseOutputItem]:
    return [
        ResponseFunctionToolCall(
            type="function_call", name=name, arguments=json.dumps(arguments), call_id=f"c-{name}"
        )
    ]


def message(text: str) -> list[TResponseOutputItem]:
    content = ResponseOutputText(type="output_text", text=text, annotations=[])
    return [
        ResponseOutputMessage(
            id="m", type="message", role="assistant", status="completed", content=[content]
        )
    ]


async def agent_uses_the_sandbox(options: CloudflareSandboxClientOptions) -> None:
    command = "python3 src/main.py > answer.txt; cat notes.txt answer.txt; exit 7"
    model = ScriptedModel(
        tool_call("exec_command", cmd=command, tty=False, yield_time_ms=1500),
        message("It is 42."),
    )
    agent = SandboxAgent(
        name="worker",
        model=model,
        instructions="Work.",
        default_manifest=MANIFEST,
        capabilities=[Shell(), Filesystem()],
    )
    sandbox_config = SandboxRunConfig(client=CloudflareSandboxClient(), options=options)
    config = RunConfig(sandbox=sandbox_config, tracing_disabled=True)
    result = await Runner.run(agent, "What does it print?", run_config=config)
    assert result.final_output == "It is 42."
    last_input = json.dumps(model.inputs[-1])
    assert "from the manifest" in last_input
    assert "42" in last_input


SCENARIOS: tuple[Scenario, ...] = (
    commands_read_files_of_the_manifest,
    timeout_is_a_result,
    command_without_output_outlasts_heartbeats,
    files_have_any_content_and_name,
    symlink_out_of_the_workspace_is_refused,
    bucket_is_mounted_by_the_manifest,
    python_prompt_in_a_terminal,
    snapshot_survives_its_sandbox,
    existing_sandbox_is_resumed,
    agent_uses_the_sandbox,
)


async def main(url: str) -> None:
    # The key comes from the environment, the only place where `resume` looks for it.
    options = CloudflareSandboxClientOptions(worker_url=url)
    # Concurrently: most of their time they wait.
    async with asyncio.TaskGroup() as group:
        for scenario in SCENARIOS:
            group.create_task(scenario(options))


asyncio.run(main(sys.argv[1]))
