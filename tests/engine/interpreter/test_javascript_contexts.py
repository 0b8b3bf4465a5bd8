"""JavaScript and TypeScript contexts of sandboxes, run by the Deno or Node found in each."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.engine.images.store import DENO, find_deno
from smokebox.engine.interpreter import context as context_module
from smokebox.errors import ProcessEnded, Unsupported
from smokebox.types import CodeResult, OutputChunk

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

# Endless loops in these tests use a full core until they are killed, which slows other tests.
pytestmark = pytest.mark.timeout(60)

# Hides the runtimes of the image and of Smokebox.
EMPTY_PATH = {"PATH": "/missing"}


@pytest_asyncio.fixture
async def sandbox(host: Host) -> Sandbox:
    return await host.create("box")


async def test_each_language_has_a_separate_default_context(sandbox: Sandbox) -> None:
    assert (await sandbox.contexts.run("const x = 1; x", language="javascript")).text == "1"
    assert (await sandbox.contexts.run("const x: string = 'a'; x", language="ts")).text == "'a'"
    assert (await sandbox.contexts.run("x = 2; x")).text == "2"
    result = await sandbox.contexts.run("x", language="node")
    assert (result.text, result.count, result.language) == ("1", 2, "javascript")
    assert len(await sandbox.contexts.list()) == 3


async def test_context_starts_with_its_cwd_and_env(sandbox: Sandbox) -> None:
    context = await sandbox.contexts.create(language="js", cwd="/tmp", env={"A": "x"})
    code = "[process.cwd(), process.env.A, process.env.B]"
    result = await sandbox.contexts.run(code, context=context, env={"B": "y"})
    assert result.results[0].json == ["/tmp", "x", "y"]


async def test_events_are_streamed_as_they_happen(sandbox: Sandbox) -> None:
    code = (
        "import fs from 'node:fs'; console.log('first');"
        "while (!fs.existsSync('go')) await new Promise(done => setTimeout(done, 10)); 'end'"
    )
    events: list[object] = []
    async with sandbox.contexts.stream(code, language="javascript") as stream:
        async for event in stream:
            if not events:
                await sandbox.write_file("go", "")
            events.append(event)
    assert events == [OutputChunk("stdout", "first\n"), CodeResult(text="'end'", main=True)]


async def test_timeout_interrupts_awaits_and_loops(sandbox: Sandbox) -> None:
    await sandbox.contexts.run("const kept = 1", language="js")
    for code in ("await new Promise(() => {})", "console.log('on'); while (true);"):
        late = await sandbox.contexts.run(code, language="js", timeout=0.3)
        assert (late.timed_out, late.context_ended) == (True, False)
        assert late.error is not None
        assert late.error.name == "TimeoutError"
        assert (await sandbox.contexts.run("kept", language="js")).text == "1"
    assert late.stdout == "on\n"


async def test_uninterruptible_loop_ends_its_context(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "INTERRUPT_SECONDS", 1.0)
    await sandbox.contexts.run("const kept = 1", language="js")
    stuck = await sandbox.contexts.run("await 1; while (true);", language="js", timeout=0.3)
    assert (stuck.timed_out, stuck.context_ended) == (True, True)
    async with sandbox.contexts.stream("console.log(1); while (true);", language="js") as stream:
        async for _ in stream:
            break
    assert (await sandbox.contexts.run("typeof kept", language="js")).text == "'undefined'"


async def test_running_code_in_a_killed_context_raises(sandbox: Sandbox) -> None:
    context = await sandbox.contexts.create(language="js")
    for code in ("process.kill(process.pid, 'SIGKILL'); await new Promise(() => {})", "1"):
        with pytest.raises(ProcessEnded, match="killed"):
            await sandbox.contexts.run(code, context=context)


async def test_output_of_child_processes_does_not_corrupt_frames(sandbox: Sandbox) -> None:
    code = (
        "import child from 'node:child_process';"
        "child.spawnSync('echo', ['inherited'], {stdio: 'inherit'});"
        "child.execFileSync('echo', ['captured']).toString()"
    )
    result = await sandbox.contexts.run(code, language="js")
    assert (result.text, result.truncated) == ("'captured\\n'", False)


async def test_missing_runtime_raises_with_a_hint(host: Host) -> None:
    sandbox = await host.create("box", env=EMPTY_PATH)
    await sandbox.exec("/bin/rm -r /opt/smokebox")
    for language in ("javascript", "typescript"):
        with pytest.raises(Unsupported, match="no deno or node") as caught:
            await sandbox.contexts.run("1", language=language)
        assert "smokebox[javascript]" in caught.value.hint
    assert await sandbox.contexts.list() == []


@pytest.mark.skipif(not os.path.exists("/usr/bin/node"), reason="Node is not installed")
async def test_node_of_the_image_is_used_without_deno(sandbox: Sandbox) -> None:
    await sandbox.exec("rm -r /opt/smokebox; rm -f $(command -v deno)")
    result = await sandbox.contexts.run("[typeof Deno, process.argv0]", language="javascript")
    assert result.results[0].json == ["undefined", "node"]


async def test_deno_of_the_image_takes_precedence(host: Host) -> None:
    sandbox = await host.create("box", env={"PATH": "/workspace/bin:/usr/bin:/bin"})
    await sandbox.write_file("bin/deno", f'#!/bin/sh\nexport FROM_IMAGE=1\nexec {DENO} "$@"\n')
    await sandbox.exec("chmod +x bin/deno")
    assert (await sandbox.contexts.run("process.env.FROM_IMAGE", language="ts")).text == "'1'"


async def test_runtime_without_typescript_raises_its_message(host: Host) -> None:
    sandbox = await host.create("box", env={"PATH": "/workspace/bin:/usr/bin:/bin"})
    await sandbox.write_file("bin/deno", '#!/bin/sh\necho "cannot run TypeScript" >&2; exit 1\n')
    await sandbox.exec("chmod +x bin/deno")
    with pytest.raises(Unsupported, match="cannot run TypeScript"):
        await sandbox.contexts.create(language="typescript")


async def test_sandbox_cannot_modify_the_deno_of_others(host: Host) -> None:
    sandbox, other = await host.create("box"), await host.create("other")
    result = await sandbox.exec(
        f"{DENO} --version; echo replaced > {DENO}; rm -r /opt/smokebox; ls /opt"
    )
    assert result.stdout.startswith("deno ")
    assert "smokebox" not in result.stdout
    assert (await other.exec(f"{DENO} --version")).stdout.startswith("deno ")
    program = find_deno()
    assert program is not None
    assert shutil.which(program) == program
    assert os.stat(program).st_size > 1 << 20
