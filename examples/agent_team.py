"""An agent delegates tasks to another, each with its own history and tools, and needs approval.

All models are scripted, so that this runs without an API key.
"""

import asyncio

from smokebox import Skill, create_agent, init, tool
from smokebox.agents.events import ApprovalNeeded, TaskStart
from smokebox.testing import ScriptedModel, call, last_returns


@tool
def price_of(item: str) -> float:
    """Return the price of an item.

    Args:
        item: Name of the item.
    """
    return {"lamp": 40.0, "desk": 310.0}[item]


@tool
def send_offer(text: str) -> str:
    """Send an offer to the customer.

    Args:
        text: The whole offer.
    """
    return f"sent {len(text)} characters"


researcher = create_agent(
    name="researcher",
    description="Knows prices.",
    model=ScriptedModel(
        [call("price_of", item="lamp"), call("price_of", item="desk")],
        lambda request: f"{sum(float(one.text) for one in last_returns(request)):g} in all.",
    ),
    tools=[price_of],
    sandbox=None,
)
offers = Skill(
    name="offers",
    description="Rules for writing an offer. Use it before you send one.",
    instructions="Begin with the sum, end with a thank you.",
)
seller = create_agent(
    name="seller",
    model=ScriptedModel(
        [
            call("task", prompt="What are a lamp and a desk?", agent="researcher"),
            call("skill", name="offers"),
        ],
        lambda request: call("send_offer", text=f"{last_returns(request)[0].text} Thank you."),
        "The offer is out.",
    ),
    tools=[send_offer],
    skills=[offers],
    subagents=[researcher],
    approval={"ask": ["send_offer"]},
    budget={"turns": 20},
)


async def main() -> None:
    async with init(seller) as harness:
        session = await harness.session()
        work = session.prompt("Offer the customer a lamp and a desk.")
        async for event in work:
            if isinstance(event, TaskStart):
                print(f"{event.agent}: {event.prompt}")
            elif isinstance(event, ApprovalNeeded):
                print(f"allowed: {event.name} {event.arguments}")
                await session.approve(event.call_id)
        reply = await work
        print(f"{reply.text} ({reply.usage.requests} turns of two agents)")


asyncio.run(main())
