"""CPU time of an agent's turn, compared with other harnesses on the same model server.

    python bench/harness.py [--turns 200] [--rounds 3]

A turn is a request with the whole conversation, the streamed reply, and one call of a function
that does nothing. The CPU time of the process with all its threads is measured; the model server is
another process. Ours records the conversation in SQLite, as by default. Each harness runs in a
separate process, alternating with the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smokebox.agents.model import ModelRequest
    from smokebox.testing.fake.server import ScriptValue

CLAUDE, GPT = "claude-sonnet-4-6", "gpt-4o"
INSTRUCTIONS = "You look at things until there is nothing left to look at. " * 20
KEY = "test-key"
SEEN = "what there is to see, on a line of its own\n" * 10
AT = (1, 50, 200)
# Median of so many turns on both sides, so that one garbage collection does not count.
AROUND = 5

Marks = list[float]
Run = Callable[[str, int, Callable[[], str]], Awaitable[object]]


async def ours(spec: str, url: str, turns: int, look: Callable[[], str], persist: bool) -> object:
    from smokebox.agents import init

    config = {
        "anthropic": {"base_url": url, "api_key": KEY},
        "openai": {"base_url": url + "/v1", "api_key": KEY},
    }

    async def look_at(thing: str) -> str:
        """Look at something."""
        return look()

    from smokebox.agents.limits import Budget
    from smokebox.agents.models import open_model

    with tempfile.TemporaryDirectory() as folder:
        async with (
            contextlib.aclosing(open_model(spec, config)) as model,
            init(
                model=model,
                instructions=INSTRUCTIONS,
                sandbox=None,
                subagents=None,
                tools=[look_at],
                compaction=False,
                budget=Budget(turns=turns + 10),
                persist=os.path.join(folder, "agents.db") if persist else False,
            ) as harness,
        ):
            session = await harness.session()
            return await session.prompt(str(turns))


async def ours_anthropic(url: str, turns: int, look: Callable[[], str]) -> object:
    return await ours(f"anthropic/{CLAUDE}", url, turns, look, True)


async def ours_openai(url: str, turns: int, look: Callable[[], str]) -> object:
    return await ours(f"openai/{GPT}", url, turns, look, True)


async def ours_in_memory(url: str, turns: int, look: Callable[[], str]) -> object:
    return await ours(f"anthropic/{CLAUDE}", url, turns, look, False)


async def _pydantic_ai(model: object, turns: int, look: Callable[[], str], stream: bool) -> object:
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.models import Model

    assert isinstance(model, Model)

    async def look_at(thing: str) -> str:
        """Look at something."""
        return look()

    async def read(_: object, events: object) -> None:
        async for _event in events:  # type: ignore[attr-defined]
            pass

    agent = Agent(model, instructions=INSTRUCTIONS, tools=[look_at])
    return await agent.run(
        str(turns),
        usage_limits=UsageLimits(request_limit=None),
        event_stream_handler=read if stream else None,
    )


def _pydantic_ai_claude(url: str) -> object:
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(api_key=KEY, base_url=url, max_retries=0)
    return AnthropicModel(CLAUDE, provider=AnthropicProvider(anthropic_client=client))


async def pydantic_ai_anthropic(url: str, turns: int, look: Callable[[], str]) -> object:
    return await _pydantic_ai(_pydantic_ai_claude(url), turns, look, True)


async def pydantic_ai_unstreamed(url: str, turns: int, look: Callable[[], str]) -> object:
    return await _pydantic_ai(_pydantic_ai_claude(url), turns, look, False)


async def pydantic_ai_openai(url: str, turns: int, look: Callable[[], str]) -> object:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = AsyncOpenAI(api_key=KEY, base_url=url + "/v1", max_retries=0)
    model = OpenAIChatModel(GPT, provider=OpenAIProvider(openai_client=client))
    return await _pydantic_ai(model, turns, look, True)


async def openai_agents(url: str, turns: int, look: Callable[[], str]) -> object:
    from openai import AsyncOpenAI

    # Imported by name: for type checkers, `agents` is a folder of our tests.
    agents: Any = importlib.import_module("agents")
    agents.set_tracing_disabled(True)

    async def look_at(thing: str) -> str:
        """Look at something."""
        return look()

    client = AsyncOpenAI(api_key=KEY, base_url=url + "/v1", max_retries=0)
    agent = agents.Agent(
        name="bench",
        instructions=INSTRUCTIONS,
        tools=[agents.function_tool(look_at)],
        model=agents.OpenAIChatCompletionsModel(model=GPT, openai_client=client),
    )
    result = agents.Runner.run_streamed(agent, str(turns), max_turns=turns + 10)
    async for _event in result.stream_events():
        pass
    return result.final_output


async def deepagents(url: str, turns: int, look: Callable[[], str]) -> object:
    from deepagents import create_deep_agent
    from langchain_anthropic import ChatAnthropic
    from pydantic import SecretStr

    def look_at(thing: str) -> str:
        """Look at something."""
        return look()

    model = ChatAnthropic(
        model_name=CLAUDE,
        api_key=SecretStr(KEY),
        base_url=url,
        max_retries=0,
        max_tokens_to_sample=4096,
        timeout=None,
        stop=None,
    )
    agent: Any = create_deep_agent(model=model, tools=[look_at], system_prompt=INSTRUCTIONS)
    state = {"messages": [{"role": "user", "content": str(turns)}]}
    async for _event in agent.astream(
        state, {"recursion_limit": 100 * turns + 1000}, stream_mode="messages"
    ):
        pass
    return None


HARNESSES: dict[str, Run] = {
    "smokebox, Anthropic": ours_anthropic,
    "smokebox in memory, Anthropic": ours_in_memory,
    "pydantic-ai Agent, Anthropic": pydantic_ai_anthropic,
    "pydantic-ai Agent unstreamed, Anthropic": pydantic_ai_unstreamed,
    "deepagents, Anthropic": deepagents,
    "smokebox, OpenAI": ours_openai,
    "pydantic-ai Agent, OpenAI": pydantic_ai_openai,
    "openai-agents, OpenAI": openai_agents,
}
REFERENCE = {"Anthropic": "pydantic-ai Agent, Anthropic", "OpenAI": "pydantic-ai Agent, OpenAI"}


async def serve() -> None:
    """Reply with as many tool calls as the first message says, then with text."""
    from smokebox.agents.messages import Text, ToolReturns, UserMessage
    from smokebox.testing import FakeModelServer, call

    def reply(request: ModelRequest) -> ScriptValue:
        server.received.clear()
        first = request.messages[0]
        assert isinstance(first, UserMessage)
        wanted = int("".join(part.text for part in first.parts if isinstance(part, Text)))
        done = sum(isinstance(message, ToolReturns) for message in request.messages)
        if done >= wanted:
            return "There is nothing left."
        return ["I look at the next of the things that there are.", call("look_at", thing="it")]

    server = FakeModelServer(then=reply)
    await server.start()
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def measure(name: str, url: str, turns: int) -> Marks:
    """Return the CPU time of the process at each call of the function."""
    await HARNESSES[name](url, 2, lambda: SEEN)
    marks: Marks = []

    def look() -> str:
        marks.append(time.process_time())
        return SEEN

    marks.append(time.process_time())
    await HARNESSES[name](url, turns, look)
    return marks


def per_turn(marks: Marks, at: int) -> float:
    """Return the median milliseconds of the turns around `at`."""
    turns = [after - before for before, after in itertools.pairwise(marks)]
    around = turns[max(0, at - AROUND) : at + AROUND] if at > AROUND else turns[1 : AROUND + 1]
    return statistics.median(around) * 1e3


def run(name: str, url: str, turns: int) -> Marks:
    command = [sys.executable, __file__, "--worker", name, "--url", url, "--turns", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"{name}: {done.stderr[-2000:]}\n")
        return []
    marks: Marks = json.loads(done.stdout.splitlines()[-1])
    return marks


def report(measured: dict[str, list[Marks]], turns: int) -> None:
    at = [turn for turn in AT if turn <= turns]
    columns = "".join(f"{f'turn {turn}':>10} {'ratio':>6}" for turn in at)
    sys.stdout.write(f"{'CPU ms of a turn':42}{columns}{'all, s':>9}\n")
    figures = {
        name: [statistics.median(per_turn(marks, turn) for marks in runs) for turn in at]
        for name, runs in measured.items()
        if runs
    }
    for name, values in figures.items():
        other = figures.get(REFERENCE[name.rpartition(", ")[2]], values)
        cells = [f"{v:10.2f} {v / o:6.2f}" for v, o in zip(values, other, strict=True)]
        total = statistics.median(marks[-1] - marks[0] for marks in measured[name])
        sys.stdout.write(f"{name:42}{''.join(cells)}{total:9.2f}\n")


def import_time() -> float:
    """Return the milliseconds of `import smokebox`, without those of starting Python."""

    def best(code: str) -> float:
        times = []
        for _ in range(9):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - started)
        return min(times) * 1e3

    return best("import smokebox") - best("pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only harnesses whose names contain this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    elif options.worker:
        marks = asyncio.run(measure(options.worker, options.url, options.turns))
        sys.stdout.write(json.dumps(marks) + "\n")
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        names = [name for name in HARNESSES if options.only in name]
        measured: dict[str, list[Marks]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:
                if marks := run(name, url, options.turns):
                    measured[name].append(marks)
        report(measured, options.turns)
        sys.stdout.write(f"import smokebox: {import_time():.1f} ms\n")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
