"""An agent reviews a document: files in and out, events as it works, and a typed result.

The model is scripted, so that this runs without an API key. Use
`model="anthropic/claude-sonnet-4-6"` for a real one.
"""

import asyncio
from dataclasses import dataclass

from smokebox import create_agent, init
from smokebox.agents.events import TextEvent, ToolEnd, ToolStart
from smokebox.agents.messages import ToolCall
from smokebox.agents.model import ModelRequest
from smokebox.testing import ScriptedModel, call, last_returns


@dataclass
class Verdict:
    """Result of the last prompt."""

    ready: bool
    reason: str


def write_review(request: ModelRequest) -> ToolCall:
    document = last_returns(request)[0].text
    missing = "no date" if "date" not in document.lower() else "nothing"
    return call("write", path="review.md", content=f"# Review\nMissing: {missing}.\n")


model = ScriptedModel(
    ["I'll read it first.\n", call("read", path="document.md")],
    write_review,
    "My findings are in review.md.\n",
    call("finish", ready=False, reason="It has no date."),
)
reviewer = create_agent(model=model, instructions="You review documents.", cwd="/workspace")


async def main() -> None:
    async with init(reviewer) as harness:
        await harness.fs.write_file("document.md", "# Plan\nWe will ship.\n")
        session = await harness.session()
        work = session.prompt("Review document.md and write your findings to review.md.")
        async for event in work:
            if isinstance(event, TextEvent):
                print(event.text, end="")
            elif isinstance(event, ToolStart):
                print(f"  {event.name} {event.arguments.get('path', '')}", end="")
            elif isinstance(event, ToolEnd):
                print(f": {event.status}")
        print(await harness.fs.read_file("review.md"), end="")

        reply = await session.prompt("Is it ready?", result=Verdict)
        print(reply.data)
        print(f"{session.usage.requests} turns, {session.usage.input_tokens} tokens read")


asyncio.run(main())
