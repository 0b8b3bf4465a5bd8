"""Time to the first and to the next result of code in a sandbox, compared with ipykernel.

    python bench/interpreter.py [--rounds 15] [--warm 200]

Ours runs Python and JavaScript in a running Linux sandbox, through the engine and through the SDK
with a server. ipykernel runs on this machine without isolation, through jupyter_client. A bare
`python3 -c` and `deno eval` are the lower bounds. All alternate in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from smokebox.client.client import connect
from smokebox.engine import Host
from smokebox.engine.images.store import find_deno
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from table import Table, in_turns

if TYPE_CHECKING:
    from smokebox.client.sandbox import Sandbox as Remote
    from smokebox.engine.sandbox import Sandbox

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
CODE = "6 * 7"


class Jupyter:
    """A kernel of ipykernel, started by `first`."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._client: Any = None

    async def first(self) -> None:
        """Start the kernel and wait for the first result."""
        # Imported by name: it is installed for benchmarks only.
        jupyter = importlib.import_module("jupyter_client.manager")
        self._manager = jupyter.AsyncKernelManager(kernel_name="python3")
        await self._manager.start_kernel(stderr=subprocess.DEVNULL)
        self._client = self._manager.client()
        self._client.start_channels()
        await self._client.wait_for_ready(timeout=60)
        await self.execute()

    async def execute(self) -> None:
        """Run code and wait until the kernel is idle again."""
        message = self._client.execute(CODE)
        seen = False
        while True:
            reply = await self._client.get_iopub_msg(timeout=60)
            if reply["parent_header"].get("msg_id") != message:
                continue
            seen |= reply["msg_type"] == "execute_result"
            if reply["msg_type"] == "status" and reply["content"]["execution_state"] == "idle":
                break
        assert seen

    async def end(self) -> None:
        """Stop the kernel, which is not measured."""
        self._client.stop_channels()
        await self._manager.shutdown_kernel(now=True)


async def bare() -> None:
    """Start the Python of the sandbox."""
    subprocess.run([PYTHON, "-c", CODE], check=True)


async def bare_deno() -> None:
    """Start Deno."""
    subprocess.run([find_deno() or "deno", "eval", CODE], check=True)


async def first_in_engine(sandbox: Sandbox, language: str) -> str:
    """Create a context, run code in it, and return its id."""
    context = await sandbox.contexts.create(language=language)
    assert (await sandbox.contexts.run(CODE, context=context)).text == "42"
    return context.id


async def first_results(sandbox: Sandbox, remote: Remote, rounds: int) -> list[list[float]]:
    """Return the seconds to a first result: bare, engine, SDK, ipykernel, Deno, JavaScript."""
    times: list[list[float]] = [[], [], [], [], [], []]
    for _ in range(rounds):
        one, other = await in_turns(bare, bare_deno, repeats=1)
        times[0] += one
        times[4] += other
        for index, language in ((1, "python"), (5, "javascript")):
            started = time.perf_counter()
            context_id = await first_in_engine(sandbox, language)
            times[index].append(time.perf_counter() - started)
            await sandbox.contexts.delete(context_id)
        started = time.perf_counter()
        context = await remote.create_code_context()
        assert (await remote.run_code(CODE, context=context)).text == "42"
        times[2].append(time.perf_counter() - started)
        await remote.delete_code_context(context)
        jupyter = Jupyter()
        started = time.perf_counter()
        await jupyter.first()
        times[3].append(time.perf_counter() - started)
        await jupyter.end()
    return times


async def warm_results(sandbox: Sandbox, remote: Remote, repeats: int) -> list[list[float]]:
    """Return the seconds to the next result: engine, SDK, ipykernel, JavaScript."""
    jupyter = Jupyter()
    await jupyter.first()
    try:
        works = (
            lambda: sandbox.contexts.run(CODE),
            lambda: remote.run_code(CODE),
            jupyter.execute,
            lambda: sandbox.contexts.run(CODE, language="javascript"),
        )
        await in_turns(*works, repeats=5)
        return await in_turns(*works, repeats=repeats)
    finally:
        await jupyter.end()


async def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = ServerSettings(home=f"{folder}/served", pool=0)
        async with await Host.open(f"{folder}/own", pool=0) as host, run_server(home) as server:
            sandbox = await host.create("bench")
            client = connect(f"unix:{server.socket}")
            async with await client.create() as remote:
                await remote.wake()
                first = await first_results(sandbox, remote, options.rounds)
                warm = await warm_results(sandbox, remote, options.warm)
            await client.aclose()
            await sandbox.destroy()
    table = Table()
    table.line("python3 -c, bare", first[0], to="itself", other=first[0])
    table.line("first result, engine", first[1], to="bare", other=first[0])
    table.line("first result, SDK and server", first[2], to="bare", other=first[0])
    table.line("first result, ipykernel", first[3], to="engine", other=first[1])
    table.line("deno eval, bare", first[4], to="itself", other=first[4])
    table.line("first result, JavaScript", first[5], to="deno eval", other=first[4])
    table.line("next result, engine", warm[0], to="ipykernel", other=warm[2])
    table.line("next result, SDK and server", warm[1], to="ipykernel", other=warm[2])
    table.line("next result, ipykernel", warm[2], to="engine", other=warm[0])
    table.line("next result, JavaScript", warm[3], to="ipykernel", other=warm[2])


if __name__ == "__main__":
    asyncio.run(main())
