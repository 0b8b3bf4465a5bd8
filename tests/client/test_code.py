"""Code in a sandbox through the SDK, with `await` and without."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from smokebox import sync
from smokebox.errors import InvalidOption, NotFound, ProcessEnded, SandboxRestarted
from smokebox.types import CodeError, CodeResult, OutputChunk

if TYPE_CHECKING:
    from client.server_process import ServerProcess
    from smokebox.client.client import Client

ENDLESS = "import time\nopen('started', 'w').close()\nwhile True: time.sleep(0.01)"


async def test_code_runs_in_the_given_context(client: Client) -> None:
    async with await client.create() as sandbox:
        context = await sandbox.create_code_context(language="python", cwd="/tmp", timeout=9)
        assert (context.language, context.cwd, context.timeout) == ("python", "/tmp", 9)
        await sandbox.run_code("x = 20", context=context)
        result = await sandbox.run_code("print('hi')\nx + 1", context=context.id, env={"A": "1"})
        assert (result.text, result.stdout, result.success, result.count) == ("21", "hi\n", True, 2)
        assert (await sandbox.run_code("x")).error is not None
        assert [one.default for one in await sandbox.list_code_contexts()] == [False, True]
        await sandbox.delete_code_context(context)
        with pytest.raises(NotFound):
            await sandbox.run_code("x", context=context)


async def test_code_stream_yields_events_and_the_execution(client: Client) -> None:
    code = (
        "print('a')\ndisplay('b')\nclass P:\n    def _repr_png_(self): return b'\\x89'\n"
        "display(P())\n1 / 0"
    )
    async with await client.create() as sandbox, sandbox.run_code_stream(code) as stream:
        events = [event async for event in stream]
    kinds = [type(event) for event in events]
    assert kinds == [OutputChunk, CodeResult, CodeResult, CodeError]
    assert isinstance(events[2], CodeResult)
    assert events[2].png == b"\x89"
    assert stream.execution.error == events[3]


async def test_cancelling_interrupts_the_code_and_keeps_the_context(client: Client) -> None:
    async with await client.create() as sandbox:
        await sandbox.run_code("x = 'kept'")
        running = asyncio.create_task(sandbox.run_code(ENDLESS))
        async with asyncio.timeout(15):
            while not await sandbox.exists("started"):
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await sandbox.run_code("x")).text == "'kept'"
        late = await sandbox.run_code(ENDLESS, timeout=0.3)
        assert (late.timed_out, late.context_ended) == (True, False)


async def test_errors_are_raised_as_their_classes(client: Client) -> None:
    async with await client.create() as sandbox:
        context = await sandbox.create_code_context()
        with pytest.raises(ProcessEnded, match="exit code 3"):
            await sandbox.run_code("import os; os._exit(3)", context=context)
        other = await sandbox.create_code_context()
        await sandbox.sleep()
        with pytest.raises(SandboxRestarted, match="fell asleep"):
            await sandbox.run_code("1", context=other)
        for options in ({"language": "cobol"}, {"timeout": 0}, {"env": {"": "x"}}):
            with pytest.raises(InvalidOption):
                await sandbox.run_code("1", **options)
        with pytest.raises(InvalidOption):
            await sandbox.delete_code_context("a/b")


async def test_each_language_has_its_own_default_context(client: Client) -> None:
    async with await client.create() as sandbox:
        assert (await sandbox.run_code("const n: number = 2; n", language="ts")).text == "2"
        result = await sandbox.run_code("console.log('hi'); ({a: 1})", language="javascript")
        assert (result.stdout, result.results[0].json, result.language) == (
            "hi\n",
            {"a": 1},
            "javascript",
        )
        kinds = [one.language for one in await sandbox.list_code_contexts()]
        assert kinds == ["typescript", "javascript"]


def test_code_without_await(server: ServerProcess) -> None:
    with sync.connect(server.url).create() as sandbox:
        context = sandbox.create_code_context()
        sandbox.run_code("x = 1", context=context)
        with sandbox.run_code_stream("print('a')\nx + 1", context=context) as stream:
            events = list(stream)
        assert events == [OutputChunk("stdout", "a\n"), CodeResult(text="2", main=True)]
        assert (stream.execution.count, sandbox.list_code_contexts()[0].id) == (2, context.id)
        sandbox.delete_code_context(context)
        assert sandbox.list_code_contexts() == []
