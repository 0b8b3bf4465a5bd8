"""Which agent works, in which sandbox, with which model, and in which conversation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from smokebox.agents.agent import Agent, AgentContext
from smokebox.agents.log.opening import open_store
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi


def changed(agent: Agent, **options: Any) -> Agent:
    """That agent with other options, whatever its initializer says."""

    async def initializer(ctx: AgentContext) -> Any:
        return dataclasses.replace(await agent.options(ctx), **options)

    return Agent(name=agent.name, description=agent.description, initializer=initializer)


def open_sandbox(name: str) -> SandboxApi:
    """`virtual`, `local` (this directory, without isolation), or a Linux sandbox by its id."""
    if name == "virtual":
        from smokebox.sandbox.virtual import virtual

        return virtual()
    if name == "local":
        from smokebox.sandbox.local import local

        return local()
    from smokebox.client.client import get_sandbox

    return get_sandbox(name)


async def last_id(agent: Agent) -> str:
    """The instance of an agent that somebody talked to last. Raises `NotFound`."""
    options = await agent.options(AgentContext(id="none", env=None))
    store = open_store(options.persist)
    try:
        found = await store.sessions(agent=agent.name, limit=1)
    finally:
        await store.aclose()
    if not found:
        raise NotFound(
            f"the agent {agent.name!r} has no conversation to continue.",
            hint="Leave --continue out to begin one.",
            kind="session",
        )
    return found[0].key.id
