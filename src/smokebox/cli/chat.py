"""`smokebox chat`: a conversation with an agent, line by line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smokebox.cli.run import Continue, Instance, ModelChoice, SandboxChoice  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.agents.agent import Agent

MODEL = "SMOKEBOX_MODEL"


def chat(
    file: Annotated[
        str | None, typer.Argument(help="A Python file with an agent; without, a plain one.")
    ] = None,
    sandbox: SandboxChoice = None,
    model: ModelChoice = None,
    id: Instance = None,
    resume: Continue = False,
) -> int:
    """Talk to an agent.

    An empty line does nothing, Ctrl-C calls off what it does, Ctrl-D ends the conversation,
    which `smokebox chat --continue` takes up again.
    """
    import asyncio

    agent = _agent(file, model)
    return asyncio.run(_talk(agent, sandbox, model, id, resume))


def _agent(file: str | None, model: str | None) -> Agent:
    from smokebox.agents.agent import create_agent
    from smokebox.agents.loading import load_agent
    from smokebox.errors import InvalidOption

    if file is not None:
        return load_agent(file)
    chosen = model or os.environ.get(MODEL)
    if not chosen:
        raise InvalidOption(
            "no model is named.",
            hint=f"Pass --model PROVIDER/MODEL, set {MODEL}, or pass a file with an agent.",
            option="--model",
        )
    return create_agent(name="chat", model=chosen)


async def _talk(
    agent: Agent, sandbox: str | None, model: str | None, id: str | None, resume: bool
) -> int:
    from smokebox.cli.agents.asking import ask
    from smokebox.cli.agents.opening import opened
    from smokebox.cli.agents.showing import TerminalView
    from smokebox.cli.agents.working import finish, watch
    from smokebox.cli.failure import report
    from smokebox.errors import SmokeboxError

    async with opened(agent, sandbox=sandbox, model=model, id=id, resume=resume) as harness:
        session: Any = await harness.session()
        await finish(session, TerminalView())
        while (line := await ask()) is not None:
            if not line.strip():
                continue
            try:
                await watch(session, session.prompt(line.rstrip("\n")), TerminalView())
            except SmokeboxError as error:
                report(error)
    return 0
