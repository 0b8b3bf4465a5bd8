"""Write a document to the workspace, prompt an agent, and return the file that it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox import create_agent
from smokebox.testing import ScriptedModel, call

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext

# Instead of "anthropic/claude-sonnet-4-6", so that it runs without an API key.
model = ScriptedModel(
    call("bash", command="grep -n 'will' document.md"),
    call("write", path="review.md", content="Line 2 promises, and names no date.\n"),
    "I wrote review.md.",
)
reviewer = create_agent(name="reviewer", model=model, cwd="/workspace")


async def run(ctx: WorkflowContext) -> dict[str, str]:
    """Take `{"document": "..."}` and return `{"review": "..."}`."""
    harness = await ctx.init(reviewer)
    await harness.fs.write_file("document.md", ctx.payload["document"])
    session = await harness.session()
    await session.prompt("Review document.md and write your findings to review.md.")
    return {"review": await harness.fs.read_file("review.md")}
