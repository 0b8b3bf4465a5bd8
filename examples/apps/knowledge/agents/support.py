"""Answer questions from a knowledge base: a bucket that the agent searches with a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox import get_virtual_sandbox
from smokebox.testing import ScriptedModel, call, last_text

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext

triggers = {"webhook": True}


async def handler(ctx: WorkflowContext) -> str:
    """Take a question as `{"message": "..."}` and return the answer."""
    sandbox = await get_virtual_sandbox(ctx.env.KNOWLEDGE_BASE)
    model = ScriptedModel(call("bash", command="grep -rih refund ."), last_text)
    harness = await ctx.init(model=model, sandbox=sandbox)
    session = await harness.session()
    message = ctx.payload["message"]
    return str(await session.prompt(f"Search the knowledge base and answer: {message}"))
