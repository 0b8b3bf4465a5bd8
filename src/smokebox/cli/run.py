"""`smokebox run`: an agent of a file, or a workflow of a project, works in front of you."""

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
    file: Annotated[
        str, typer.Argument(help="A Python file with an agent, or the name of a workflow.")
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="What the agent is to do; - reads it from stdin.")
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE|-", help="What the workflow is given."),
    ] = None,
    sandbox: SandboxChoice = None,
    model: ModelChoice = None,
    id: Instance = None,
    resume: Continue = False,
    session: Annotated[str, typer.Option(help="The session of that conversation.")] = "default",
    json: Annotated[bool, typer.Option("--json", help="Write each event as JSON.")] = False,
) -> int:
    """Have an agent do something, or run a workflow of this project, and watch.

    What the agent says, or what the workflow returns as JSON, goes to stdout, everything else
    to stderr. Ctrl-C calls it off. For example:
    smokebox run agent.py "Review document.md." --sandbox local
    smokebox run review --payload @plan.json
    """
    import asyncio

    if prompt is None:
        return _run_workflow(file, payload)
    from smokebox.agents.loading import load_agent
    from smokebox.cli.agents.showing import JsonView, TerminalView

    text = sys.stdin.read() if prompt == "-" else prompt
    agent = load_agent(file)
    view: View = JsonView() if json else TerminalView()
    return asyncio.run(_work(agent, text, view, sandbox, model, id, resume, session))


def _run_workflow(name: str, payload: str | None) -> int:
    from pathlib import Path

    from smokebox.cli.project.foreground import run_workflow
    from smokebox.errors import InvalidOption

    if name.endswith(".py") and not Path(name).parent.name == "workflows":
        raise InvalidOption(
            f"what is the agent of {name} to do?",
            hint=f'Write smokebox run {name} "..."; a workflow is run by its name.',
            option="prompt",
        )
    return run_workflow(name.removesuffix(".py").rpartition("/")[2], payload, folder=Path.cwd())


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
