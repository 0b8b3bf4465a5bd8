"""Rollouts for reinforcement learning: many episodes from one prepared state.

    python examples/rollouts.py

The state is a snapshot, so that later runs of this program start from it too. Each episode has a
sandbox of its own, is scored by its files, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import random

from smokebox import Sandbox, connect
from smokebox.errors import NotFound

STATE = "rollouts-start"
EPISODES, AT_ONCE, STEPS = 12, 4, 5


async def prepare() -> None:
    """Make the state that all episodes start from, unless it exists."""
    try:
        await connect().snapshots.get(STATE)
        return
    except NotFound:
        pass
    async with await Sandbox.create() as sandbox:
        await sandbox.exec("mkdir maze && cd maze && mkdir -p left/left left/right right/left/left")
        await sandbox.exec("echo 1 > maze/left/right/prize; echo 10 > maze/right/left/left/prize")
        await sandbox.snapshot(STATE, description="a maze of directories")


async def episode(seed: int, turns: asyncio.Semaphore) -> int:
    """Walk at random, and return the prize that was found."""
    policy = random.Random(seed)
    async with turns, await Sandbox.create(snapshot=STATE) as sandbox:
        session = await sandbox.create_session(cwd="/workspace/maze")
        for _ in range(STEPS):
            await session.exec(f"cd {policy.choice(('left', 'right'))} 2>/dev/null || cd ..")
            await session.exec("[ -e prize ] && mv prize /workspace/found")
        found = await sandbox.exec("cat found 2>/dev/null || echo 0")
    return int(found.stdout)


async def main() -> None:
    await prepare()
    turns = asyncio.Semaphore(AT_ONCE)
    rewards = await asyncio.gather(*(episode(seed, turns) for seed in range(EPISODES)))
    print(f"{len(rewards)} episodes, mean reward {sum(rewards) / len(rewards):.1f}")
    await connect().snapshots.delete(STATE)


asyncio.run(main())
