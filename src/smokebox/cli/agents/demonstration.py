"""An agent at work that needs no key: its model is a script, and all else is real."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.agent import create_agent
from smokebox.agents.initializing import init
from smokebox.cli.agents.showing import TerminalView
from smokebox.testing import ScriptedModel, call
from smokebox.testing.turns import last_returns

if TYPE_CHECKING:
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.model import ModelRequest
    from smokebox.sandbox.api import SandboxApi

PROMPT = "Which city spends most? Write the answer to answer.md."
ORDERS = "city,amount\nLisbon,40\nOslo,120\nLisbon,310\nQuito,40\n"
_SUM = "awk -F, 'NR > 1 { sum[$1] += $2 } END { for (city in sum) print sum[city], city }' "


def _write(request: ModelRequest) -> ToolCall:
    amount, city = last_returns(request)[0].text.split()[:2]
    return call("write", path="answer.md", content=f"{city} spends most: {amount}.\n")


async def demonstrate(sandbox: SandboxApi) -> str:
    """Have it work there, shown as it goes; gives what it wrote."""
    model = ScriptedModel(
        ["I'll add them up.\n", call("bash", command=f"{_SUM} orders.csv | sort -rn")],
        _write,
        "Done: the answer is in answer.md.\n",
    )
    view = TerminalView()
    async with init(create_agent(name="demo", model=model, sandbox=sandbox, persist=False)) as at:
        await at.fs.write_file("orders.csv", ORDERS)
        operation = (await at.session()).prompt(PROMPT)
        async for event in operation:
            view.show(event)
        await operation
        return await at.fs.read_file("answer.md")
