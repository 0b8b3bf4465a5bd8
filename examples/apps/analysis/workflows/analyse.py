"""Answer a question about a table with a program that the agent writes, as a typed result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox import Sandbox
from smokebox.testing import ScriptedModel, call, last_text

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext

PROGRAM = """\
import collections, csv, json
total = collections.Counter()
for row in csv.DictReader(open("orders.csv")):
    total[row["city"]] += int(row["amount"])
city, amount = total.most_common(1)[0]
print(json.dumps({"city": city, "amount": amount}))
"""


@dataclass
class Finding:
    """Answer to the question."""

    city: str
    amount: int


async def run(ctx: WorkflowContext) -> Finding:
    """Take `{"table": "...", "question": "..."}` and return a `Finding`."""
    model = ScriptedModel(
        call("write", path="analyse.py", content=PROGRAM),
        call("bash", command="python3 analyse.py"),
        lambda request: call("finish", **json.loads(last_text(request))),
    )
    async with await Sandbox.create(limits="lite") as sandbox:
        harness = await ctx.init(model=model, sandbox=sandbox)
        await harness.fs.write_file("orders.csv", ctx.payload["table"])
        session = await harness.session()
        reply = await session.prompt(ctx.payload["question"], result=Finding)
    assert reply.data is not None
    return reply.data
