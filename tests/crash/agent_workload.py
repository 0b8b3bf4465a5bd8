"""An agent to be killed, which prints its phase and resumes its work when restarted.

    agent_workload.py HOME PROMPTS

Its model is a function of the request, so that it does not matter which process sends it: it
counts steps up to a goal, and never requests the same one twice. A step appends a line to a file
of effects, which shows whether it was done twice.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import TYPE_CHECKING

from agents.log.random_session import sendable
from smokebox.agents.agent import create_agent
from smokebox.agents.harness import init
from smokebox.agents.limits import Durability
from smokebox.agents.messages import (
    AssistantMessage,
    Text,
    ToolCall,
    ToolReturns,
    UserMessage,
)
from smokebox.agents.model import ModelInfo
from smokebox.agents.tools.function import tool
from smokebox.agents.tools.tool import ToolContext  # noqa: TC001
from smokebox.agents.work.compaction import Compaction
from smokebox.testing.scripted import ScriptedModel, Turn, call

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from smokebox.agents.messages import Message
    from smokebox.agents.model import Delta, ModelRequest

HOME = sys.argv[1]
PROMPTS = int(sys.argv[2])
STEPS_EACH = 6
PACE = 0.001
INFO = ModelInfo(context_window=4000, max_output=400)


def report(*values: object) -> None:
    sys.stdout.write(" ".join(map(str, values)) + "\n")
    sys.stdout.flush()


def record_effect(line: str) -> None:
    """Append a line to the file of effects, which outlives this process."""
    file = os.open(f"{HOME}/effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{line}\n".encode())
    os.close(file)


@tool
async def effect(step: str) -> str:
    """Do a step, which must not be done twice."""
    record_effect(step)
    report("tool")
    await asyncio.sleep(PACE)
    return f"did {step}"


@tool(durable=True)
async def durable_effect(step: str, ctx: ToolContext) -> str:
    """Do a step, which may be done twice under the same key."""
    record_effect(f"durable {ctx.key} {step}")
    report("durable")
    await asyncio.sleep(PACE)
    return f"did {step}"


def texts(messages: tuple[Message, ...]) -> Iterator[str]:
    for message in messages:
        match message:
            case ToolReturns():
                yield from (one.text for one in message.returns)
            case UserMessage() | AssistantMessage():
                for part in message.parts:
                    if isinstance(part, Text):
                        yield part.text
                    elif isinstance(part, ToolCall):
                        yield part.arguments


def child_of(messages: tuple[Message, ...]) -> str:
    """Return the name of a child, by its first prompt; empty for the parent."""
    first = messages[0]
    found = re.search(r"child-\d+", " ".join(texts(messages[:1])))
    is_summary = isinstance(first, UserMessage) and first.signal == "summary"
    return "" if found is None or is_summary else found[0]


def respond(request: ModelRequest) -> Turn:
    messages = tuple(request.messages)
    history = "\n".join(texts(messages))
    step = max(map(int, re.findall(r"step-(\d+)", history)), default=0)
    goal = max(map(int, re.findall(r"goal-(\d+)", history)), default=0)
    if not request.tools:
        return Turn(f"They got to step-{step} on the way to goal-{goal}.", pace=PACE)
    if child := child_of(messages):
        if any(isinstance(message, ToolReturns) for message in messages):
            return Turn("The child is done.", pace=PACE)
        return Turn(["A child.", call("effect", call_id="only", step=child)], pace=PACE)
    if step >= goal:
        return Turn(f"I have reached goal-{goal}.", pace=PACE)
    return Turn([f"Now comes step-{step + 1}. " + "And so on. " * 40, *calls(step + 1)], pace=PACE)


def calls(step: int) -> list[ToolCall]:
    if step % 4 == 0:
        return [
            call("task", call_id=f"c{step}", prompt=f"Be child-0{step}.", agent="helper"),
            marker(step),
        ]
    if step % 3 == 0:
        return [
            call("effect", call_id=f"c{step}", step=f"step-{step}"),
            call("durable_effect", call_id=f"c{step + 1}", step=f"step-{step + 1}"),
        ]
    return [call("effect", call_id=f"c{step}", step=f"step-{step}")]


def marker(step: int) -> ToolCall:
    return call("effect", call_id=f"m{step}", step=f"step-{step}")


class ReportingModel:
    """A scripted model that reports each chunk of a response."""

    name = "crash/model"
    info = INFO

    def __init__(self) -> None:
        self._script = ScriptedModel(then=respond, info=INFO, chunk=40)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        assert sendable(request.messages), "no provider accepts this history"
        child = child_of(tuple(request.messages))
        phase = "compaction" if not request.tools else "child" if child else "stream"
        async for item in self._script.stream(request):
            yield item
            if not isinstance(item, AssistantMessage):
                report(phase)

    async def aclose(self) -> None:
        await self._script.aclose()


async def main() -> None:
    model = ReportingModel()
    helper = create_agent(name="helper", model=model, sandbox=None, tools=[effect])
    agent = create_agent(
        name="crash",
        model=model,
        sandbox=None,
        tools=[effect, durable_effect],
        subagents=[helper],
        persist=f"{HOME}/agents.db",
        compaction=Compaction(reserve=1500, keep_recent=300),
        durability=Durability(max_attempts=1000, retries=0),
    )
    async with init(agent, id="one") as harness:
        session = await harness.session()
        report("ready")
        for number in range(1, PROMPTS + 1):
            text = f"Please get to goal-{number * STEPS_EACH}."
            reply = await session.prompt(text, key=f"prompt-{number}", when_busy="queue")
            report("done", number, reply.text)


asyncio.run(main())
