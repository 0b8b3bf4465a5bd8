"""One agent for each kind of sandbox, at the same time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox import get_sandbox
from smokebox.testing import ScriptedModel, call, last_text

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext

PROGRAMS = {
    "PyBox": "echo \"$LANGUAGE: $(python3 -c 'print(6 * 7)')\"",
    "ShellBox": 'echo "$LANGUAGE: $((6 * 7))"',
}


async def run(ctx: WorkflowContext) -> dict[str, str]:
    """Return the reply of each agent."""

    async def work(name: str) -> str:
        sandbox = get_sandbox(getattr(ctx.env, name), f"{name.lower()}-{ctx.id[:8]}")
        model = ScriptedModel(call("bash", command=PROGRAMS[name]), last_text)
        try:
            harness = await ctx.init(model=model, sandbox=sandbox, name=name.lower())
            session = await harness.session()
            return str(await session.prompt("What is six times seven?")).strip()
        finally:
            await sandbox.destroy()

    return dict(zip(PROGRAMS, await asyncio.gather(*map(work, PROGRAMS)), strict=True))
