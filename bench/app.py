"""Overhead of serving agents, compared with pyflue, with the same model server behind both.

    python bench/app.py [--admissions 400] [--readers 100] [--lines 100] [--rounds 15]

Admissions are messages accepted for background work: ours are on disk before the response,
pyflue's are in memory. The time to the first token is that from a POST to the first piece of the
reply, minus the model's own. Fan-out is the number of log lines of a run that reach all watchers
each second. pyflue needs another version of Pydantic AI, so it has its own environment, created by
the first run. Each server is a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from table import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PEER = "pyflue==0.2.0"
MODEL = "gpt-4o"
SLOW = "slow"
EVENTS = {"accept": "text/event-stream"}
FILES = {
    "ours": {
        "agents/echo.py": f"""
from smokebox import create_agent
agent = create_agent(model="openai/{MODEL}")
""",
        "smokebox.toml": '[models.openai]\nbase_url = "MODELS/v1"\napi_key = "test-key"\n',
        "workflows/report.py": """
import asyncio
async def run(ctx):
    while not await asyncio.to_thread(GO.exists):
        await asyncio.sleep(0.01)
    for number in range(ctx.payload["lines"]):
        ctx.log.info(f"line {number}")
        await asyncio.sleep(0)
from pathlib import Path
GO = Path(__file__).parents[1] / "go"
""",
    },
    "pyflue": {
        "agents/echo.py": f"""
from pyflue import create_agent
default = create_agent(lambda ctx: {{"model": "openai:{MODEL}"}})
""",
        "workflows/report.py": """
import asyncio
async def run(ctx):
    while not await asyncio.to_thread(GO.exists):
        await asyncio.sleep(0.01)
    for number in range(ctx.payload["lines"]):
        await ctx.log.info(f"line {number}")
        await asyncio.sleep(0)
from pathlib import Path
GO = Path(__file__).parents[1] / "go"
""",
        "pyflue.toml": f'[agent]\nmodel = "openai:{MODEL}"\n',
    },
}
SERVE = {
    "ours": "import sys, uvicorn; from smokebox.app import create_app; "
    "uvicorn.run(create_app('.'), port=int(sys.argv[1]), log_level='warning')",
    "pyflue": "import sys, uvicorn; from pyflue.server import create_app; "
    "uvicorn.run(create_app('pyflue.toml'), port=int(sys.argv[1]), log_level='warning')",
}
MODELS = """
import asyncio, sys
from smokebox.testing import FakeModelServer, Turn, last_text

def reply(request):
    return Turn("A short answer. " * 4, delay=20 if "slow" in last_text(request) else 0)

async def main():
    async with FakeModelServer(then=reply) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
# Paths of each server, and the events that have text of the reply.
DISPATCH = {"ours": "/agents/echo/{id}", "pyflue": "/agents/echo/{id}/dispatch"}
STREAM = {"ours": "/runs/{id}", "pyflue": "/runs/{id}/stream"}
WORDS = {"ours": (b"event: reply_delta", b"event: reply_ended"), "pyflue": (b"A short",)}


def peer_python() -> str:
    """Return the interpreter with pyflue, which is installed by the first run."""
    home = Path(sys.prefix) / "pyflue"
    python = home / "bin" / "python"
    if not (home / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", PEER], check=True)
        (home / ".installed").touch()
    return str(python)


@contextlib.asynccontextmanager
async def models() -> AsyncIterator[str]:
    """Run a model server and yield its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MODELS, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def server(framework: str, model_url: str) -> AsyncIterator[tuple[str, Path]]:
    """Serve a new project and yield its URL and its folder."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        for path, text in FILES[framework].items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text.replace("MODELS", model_url))
        python = sys.executable if framework == "ours" else peer_python()
        env = {**os.environ, "OPENAI_API_KEY": "test-key", "SMOKEBOX_HOME": name}
        if framework == "pyflue":
            env["OPENAI_BASE_URL"] = f"{model_url}/v1"
        process = await asyncio.create_subprocess_exec(
            python, "-c", SERVE[framework], str(port), cwd=folder, env=env
        )
        url = f"http://127.0.0.1:{port}"
        try:
            async with aiohttp.ClientSession() as http:
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(f"{url}/health") as response:
                            assert response.status == 200
                            break
                    await asyncio.sleep(0.05)
            yield url, folder
        finally:
            process.kill()
            await process.wait()


async def admissions(framework: str, url: str, count: int) -> float:
    """Return the number of messages accepted per second, sent by 32 clients."""
    async with aiohttp.ClientSession() as http:

        async def send(number: int) -> None:
            path = DISPATCH[framework].format(id=f"c{number % 50}")
            body = {"message": SLOW, "input": SLOW} if framework == "pyflue" else {"message": SLOW}
            async with http.post(url + path, json=body) as response:
                assert response.status == 202, await response.text()

        # The first reply imports the SDK of the model.
        await first_token(framework, http, url, "warm")
        started = time.perf_counter()
        await spread(send, count, 32)
        return count / (time.perf_counter() - started)


async def spread(work: Callable[[int], Awaitable[None]], count: int, at_once: int) -> None:
    numbers = iter(range(count))

    async def one() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(one() for _ in range(at_once)))


async def first_token(framework: str, http: aiohttp.ClientSession, url: str, id: str) -> float:
    """Return the time from a POST to the first text of the reply."""
    started = time.perf_counter()
    path = f"{url}/agents/echo/{id}"
    async with http.post(path, json={"message": "hello"}, headers=EVENTS) as response:
        return await time_to(response, WORDS[framework], started)


async def first_token_of_model(http: aiohttp.ClientSession, model_url: str) -> float:
    """Return the same for a request to the model server itself."""
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": "Bearer test-key"}
    started = time.perf_counter()
    path = f"{model_url}/v1/chat/completions"
    async with http.post(path, json=body, headers=headers) as response:
        return await time_to(response, (b"A short",), started)


async def time_to(
    response: aiohttp.ClientResponse, words: tuple[bytes, ...], started: float
) -> float:
    assert response.status == 200, await response.text()
    seen, took = b"", None
    async for data in response.content.iter_any():
        seen += data
        if took is None and any(word in seen for word in words):
            took = time.perf_counter() - started
    assert took is not None, seen[-2000:]
    return took


async def fan_out(framework: str, url: str, folder: Path, readers: int, lines: int) -> float:
    """Return the number of lines per second that reach all readers."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        async with http.post(f"{url}/workflows/report", json={"lines": lines}) as response:
            run: Any = await response.json()
        path = STREAM[framework].format(id=run["id"] if framework == "ours" else run["run_id"])
        ready = asyncio.Semaphore(0)

        async def read() -> None:
            async with http.get(url + path, headers=EVENTS) as response:
                seen = b""
                async for data in response.content.iter_any():
                    if not seen:
                        ready.release()
                    seen += data
            assert seen.count(b"event: log") == lines, seen.count(b"event: log")

        watching = [asyncio.create_task(read()) for _ in range(readers)]
        for _ in watching:
            await ready.acquire()
        started = time.perf_counter()
        (folder / "go").touch()
        await asyncio.gather(*watching)
        return readers * lines / (time.perf_counter() - started)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--admissions", type=int, default=400)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--lines", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["ours", "pyflue"])
    options = parser.parse_args()
    print(f"{'':10} {'admissions/s':>14} {'first token, ms more':>22} {'lines/s to readers':>20}")
    for framework in [options.only] if options.only else ["ours", "pyflue", "ours", "pyflue"]:
        async with models() as model_url:
            async with server(framework, model_url) as (url, _), aiohttp.ClientSession() as http:
                own, times = [], []
                for number in range(options.rounds):
                    own.append(await first_token_of_model(http, model_url))
                    times.append(await first_token(framework, http, url, f"t{number % 3}"))
                more = statistics.median(times) - statistics.median(own)
            async with server(framework, model_url) as (url, _):
                rate = await admissions(framework, url, options.admissions)
            async with server(framework, model_url) as (url, folder):
                reach = await fan_out(framework, url, folder, options.readers, options.lines)
        print(f"{framework:10} {rate:14.0f} {more * 1e3:22.1f} {reach:20.0f}", flush=True)


asyncio.run(main())
