"""Report of new orders, at nine o'clock on weekdays in Lisbon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox import create_agent
from smokebox.testing import ScriptedModel, call

if TYPE_CHECKING:
    from smokebox.app import WorkflowContext

schedule = "0 9 * * 1-5"
timezone = "Europe/Lisbon"
missed = "once"
# Running it twice is harmless, so a run that a crash interrupted is restarted.
attempts = 2

ORDERS = "city,amount\nLisbon,40\nOslo,120\n"


async def run(ctx: WorkflowContext) -> str:
    """Return the report, with the time it was due or "on demand"."""
    model = ScriptedModel(
        call("bash", command="tail -n +2 orders.csv | wc -l"),
        call("write", path="report.md", content="Two orders came in.\n"),
        "Written.",
    )
    harness = await ctx.init(create_agent(name="reporter", model=model))
    await harness.fs.write_file("orders.csv", ORDERS)
    session = await harness.session()
    await session.prompt("Write a report of orders.csv to report.md.")
    due = (ctx.payload or {}).get("scheduled_at", "on demand")
    return f"{due}: {await harness.fs.read_file('report.md')}"
