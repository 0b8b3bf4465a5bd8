"""A harness for a verb, and its end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from smokebox.agents.initializing import init
from smokebox.cli.agents.choosing import changed, last_id, open_sandbox
from smokebox.cli.notice import notice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents.agent import Agent
    from smokebox.agents.harness import Harness


@contextlib.asynccontextmanager
async def opened(
    agent: Agent, *, sandbox: str | None, model: str | None, id: str | None, resume: bool
) -> AsyncIterator[Harness]:
    """An agent at work as the options of a command line say."""
    options: dict[str, Any] = {}
    if sandbox is not None:
        options["sandbox"] = open_sandbox(sandbox)
    if model is not None:
        options["model"] = model
    if resume and id is None:
        id = await last_id(agent)
    chosen = changed(agent, **options) if options else agent
    async with init(chosen, id=id) as harness:
        if id is None:
            notice(f"Conversation {harness.id} (--id {harness.id} or --continue goes on with it)")
        yield harness
