"""What OpenAI's Agents SDK does in a sandbox, by its own client as it stands.

Run by test_clients.py as a program of its own, as the package is called `agents`, and so is
a folder of our tests: `python scenarios.py URL`, with CLOUDFLARE_SANDBOX_API_KEY and BUCKET set.
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

NOT_TEXT = bytes(range(256)) * 100
MANIFEST = Manifest(
    entries={
        "notes.txt": File(content=b"from the manifest\n"),
        "src": Dir(children={"main.py": File(content=b"print(6 * 7)\n")}),
    }
)


@asynccontextmanager
async def sandbox(options: CloudflareSandboxClientOptions) -> AsyncIterator[SandboxSession]:
    """A sandbox with a manifest."""
    client = CloudflareSandboxClient()
    session = await client.create(manifest=MANIFEST, options=options)
    async with session:
        yield session
    await client.delete(session)


async def read(session: SandboxSession, path: str) -> bytes:
    with await session.read(Path(path)) as file:
        return bytes(file.read())


async def commands_run_over_the_files_of_a_manifest(
    options: CloudflareSandboxClientOptions,
) -> None:
    async with sandbox(options) as session:
        done = await session.exec("cat notes.txt; python3 src/main.py; echo ä >&2; exit 3")
        assert (done.stdout, done.stderr) == (b"from the manifest\n42\n", "ä\n".encode())
        assert done.exit_code == 3


async def a_command_that_takes_too_long_is_a_result(
    options: CloudflareSandboxClientOptions,
) -> None:
    async with sandbox(options) as session:
        done = await session.exec("printf partly; sleep 1818", timeout=1)
        assert (done.stdout, done.exit_code) == (b"partly", 124)


async def a_long_silence_is_borne(options: CloudflareSandboxClientOptions) -> None:
    async with sandbox(options) as session:
        # Longer than the server waits before it says that it lives.
        done = await session.exec("sleep 6; echo late")
        assert (done.stdout, done.exit_code) == (b"late\n", 0)


async def files_have_any_bytes_and_any_name(options: CloudflareSandboxClientOptions) -> None:
    async with sandbox(options) as session:
        for path in ("data.bin", "new/dir/a#b?c+d%41 ä.bin"):
            await session.mkdir(Path(path).parent, parents=True)
            await session.write(Path(path), io.BytesIO(NOT_TEXT))
            assert await read(session, path) == NOT_TEXT
        names = {Path(entry.path).name for entry in await session.ls(".")}
        assert names >= {"data.bin", "notes.txt", "new", "src"}
        await session.rm("new", recursive=True)
        try:
            await session.read(Path("new/dir"))
        except WorkspaceReadNotFoundError:
            return
        raise AssertionError("what is not there was read")


async def a_link_that_leads_out_is_not_followed(options: CloudflareSandboxClientOptions) -> None:
    async with sandbox(options) as session:
        await session.exec("ln -s /etc/passwd out")
        try:
            await session.read(Path("out"))
        except InvalidManifestPathError:
            return
        raise AssertionError("a link led out")


async def a_bucket_is_a_directory_of_a_manifest(options: CloudflareSandboxClientOptions) -> None:
    known = json.loads(os.environ["BUCKET"])
    mount = S3Mount(
        bucket=known["bucket"],
        endpoint_url=known["endpoint"],
        access_key_id=known["access_key"],
        secret_access_key=known["secret_key"],
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
            bucket=known["bucket"],
            mount_path="/workspace/data",
            options={
                "endpoint": known["endpoint"],
                "credentials": {
                    "accessKeyId": known["access_key"],
                    "secretAccessKey": known["secret_key"],
                },
            },
        )
        assert await read(session, "data/from-python/f") == b"kept\n"
    await client.delete(session)


async def a_python_prompt_answers_in_a_terminal(options: CloudflareSandboxClientOptions) -> None:
    async with sandbox(options) as session:
        begun = await session.pty_exec_start("python3", "-q", shell=False, tty=True, yield_time_s=1)
        assert begun.process_id is not None
        shown = b""
        await session.pty_write_stdin(
            session_id=begun.process_id, chars="print('x' * 3 + str(6 * 7))\n", yield_time_s=0.3
        )
        for chars in ("print('y' * 3)\n", "exit()\n", "echo $TERM $PWD\n"):
            told = await session.pty_write_stdin(
                session_id=begun.process_id, chars=chars, yield_time_s=1
            )
            shown += told.output
        assert b"yyy\r\n" in shown, shown
        assert b"xterm-256color /workspace\r\n" in shown, shown
        ended = await session.pty_write_stdin(
            session_id=begun.process_id, chars="exit 5\n", yield_time_s=10
        )
        assert (ended.exit_code, ended.process_id) == (5, None)


async def a_snapshot_outlives_its_sandbox(options: CloudflareSandboxClientOptions) -> None:
    client = CloudflareSandboxClient()
    with tempfile.TemporaryDirectory() as place:
        spec = LocalSnapshotSpec(base_path=Path(place))
        session = await client.create(manifest=MANIFEST, snapshot=spec, options=options)
        await session.start()
        await session.mkdir("made")
        await session.write(Path("made/data.bin"), io.BytesIO(NOT_TEXT))
        await session.exec("ln -s data.bin made/link; chmod 750 made/data.bin; rm notes.txt")
        await session.stop()
        await client.delete(session)

        again = await client.resume(session.state)
        async with again:
            assert await read(again, "made/link") == NOT_TEXT
            done = await again.exec("stat -c %a made/data.bin; ls; python3 src/main.py")
            assert done.stdout == b"750\nmade\nsrc\n42\n", done
        await client.delete(again)


async def a_sandbox_that_is_there_is_resumed_as_it_is(
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
    """Says what it was told to, and keeps what it heard."""

    def __init__(self, *turns: list[TResponseOutputItem]) -> None:
        self.turns = list(turns)
        self.heard: list[Any] = []

    async def get_response(
        self, system_instructions: Any, input: Any, *_: Any, **__: Any
    ) -> ModelResponse:
        self.heard.append(input)
        return ModelResponse(output=self.turns.pop(0), usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


def tool_call(name: str, **arguments: Any) -> list[TResponseOutputItem]:
    return [
        ResponseFunctionToolCall(
            type="function_call", name=name, arguments=json.dumps(arguments), call_id=f"c-{name}"
        )
    ]


def says(text: str) -> list[TResponseOutputItem]:
    content = ResponseOutputText(type="output_text", text=text, annotations=[])
    return [
        ResponseOutputMessage(
            id="m", type="message", role="assistant", status="completed", content=[content]
        )
    ]


async def a_whole_agent_works_in_it(options: CloudflareSandboxClientOptions) -> None:
    command = "python3 src/main.py > answer.txt; cat notes.txt answer.txt; exit 7"
    model = ScriptedModel(
        tool_call("exec_command", cmd=command, tty=False, yield_time_ms=1500),
        says("It is 42."),
    )
    agent = SandboxAgent(
        name="worker",
        model=model,
        instructions="Work.",
        default_manifest=MANIFEST,
        capabilities=[Shell(), Filesystem()],
    )
    place = SandboxRunConfig(client=CloudflareSandboxClient(), options=options)
    config = RunConfig(sandbox=place, tracing_disabled=True)
    result = await Runner.run(agent, "What does it print?", run_config=config)
    assert result.final_output == "It is 42."
    heard = json.dumps(model.heard[-1])
    assert "from the manifest" in heard
    assert "42" in heard


SCENARIOS: tuple[Scenario, ...] = (
    commands_run_over_the_files_of_a_manifest,
    a_command_that_takes_too_long_is_a_result,
    a_long_silence_is_borne,
    files_have_any_bytes_and_any_name,
    a_link_that_leads_out_is_not_followed,
    a_bucket_is_a_directory_of_a_manifest,
    a_python_prompt_answers_in_a_terminal,
    a_snapshot_outlives_its_sandbox,
    a_sandbox_that_is_there_is_resumed_as_it_is,
    a_whole_agent_works_in_it,
)


async def main(url: str) -> None:
    # The key by the environment: that is the only place where it is looked for to resume.
    options = CloudflareSandboxClientOptions(worker_url=url)
    # All at once: most of their time they wait for something.
    async with asyncio.TaskGroup() as group:
        for scenario in SCENARIOS:
            group.create_task(scenario(options))


asyncio.run(main(sys.argv[1]))
