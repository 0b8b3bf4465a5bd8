"""An agent is killed in the middle of its work, and continues where it was.

The same program runs twice. The first time its process dies while a tool runs; the second time it
finds the conversation by its id and continues it: nothing is done twice.
"""

import asyncio
import os
import subprocess
import sys

from smokebox import create_agent, init, tool
from smokebox.agents import ToolContext
from smokebox.agents.messages import ToolCall
from smokebox.agents.model import ModelRequest
from smokebox.testing import ScriptedModel, call, last_returns

LEDGER = "payments.txt"


@tool(durable=True)
def pay(amount: int, ctx: ToolContext) -> str:
    """Pay an amount.

    Args:
        amount: The amount.
    """
    with open(LEDGER, "a+") as ledger:
        ledger.seek(0)
        if ctx.key in ledger.read():
            return "Already paid."
        ledger.write(f"{amount} {ctx.key}\n")
    if ctx.attempt == 1:
        os._exit(9)  # as kill -9 does, right after the effect
    return "Paid."


def reply(request: ModelRequest) -> str | ToolCall:
    returned = last_returns(request)
    return f"Done. ({returned[0].text})" if returned else call("pay", amount=40)


clerk = create_agent(
    name="clerk", model=ScriptedModel(then=reply), tools=[pay], sandbox=None, persist="clerk.db"
)


async def work() -> None:
    async with init(clerk, id="invoice-7") as harness:
        session = await harness.session()
        operation = session.running or session.prompt("Pay the invoice.", key="pay")
        print((await operation).text)


if "--work" in sys.argv:
    asyncio.run(work())
else:
    for attempt in ("first", "second"):
        done = subprocess.run([sys.executable, __file__, "--work"], capture_output=True, text=True)
        print(f"{attempt} run: exit {done.returncode}. {done.stdout}".rstrip())
    with open(LEDGER) as ledger:
        print(f"payments: {len(ledger.readlines())}")
