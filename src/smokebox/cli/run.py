"""`smokebox run`: an agent of a file works on a prompt, in front of you."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from smokebox.cli.agents.showing import View

SandboxChoice = Annotated[
    str | None,
    typer.Option(
        "--sandbox",
        "-s",
        metavar="virtual|local|ID",
        help="Where it works, in place of what the file says.",
    ),
]
ModelChoice = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="PROVIDER/MODEL", help="In place of the file's."),
]
Instance = Annotated[
    str | None, typer.Option("--id", help="Which conversation: the same id finds it again.")
]
Continue = Annotated[
    bool, typer.Option("--continue", "-c", help="Go on with the last conversation.")
]


def run(
    file: Annotated[str, typer.Argument(help="A Python file with an agent.")],
    prompt: Annotated[str, typer.Argument(help="What it is to do; - reads it from stdin.")],
    sandbox: SandboxChoice = None,
    model: ModelChoice = None,
    id: Instance = None,
    resume: Continue = False,
    session: Annotated[str, typer.Option(help="The session of that conversation.")] = "default",
    json: Annotated[bool, typer.Option("--json", help="Write each event as JSON.")] = False,
) -> int:
    """Have an agent do something, and watch.

    What it says goes to stdout, everything else to stderr. Ctrl-C calls it off. For example:
    smokebox run agent.py "Review document.md." --sandbox local
    """
    import asyncio

    from smokebox.agents.loading import load_agent
    from smokebox.cli.agents.showing import JsonView, TerminalView

    text = sys.stdin.read() if prompt == "-" else prompt
    agent = load_agent(file)
    view: View = JsonView() if json else TerminalView()
    return asyncio.run(_work(agent, text, view, sandbox, model, id, resume, session))


async def _work(
    agent: Any,
    text: str,
    view: View,
    sandbox: str | None,
    model: str | None,
    id: str | None,
    resume: bool,
    name: str,
) -> int:
    from smokebox.cli.agents.opening import opened
    from smokebox.cli.agents.working import finish, watch

    async with opened(agent, sandbox=sandbox, model=model, id=id, resume=resume) as harness:
        session = await harness.session(name)
        await finish(session, view)
        return await watch(session, session.prompt(text), view)
