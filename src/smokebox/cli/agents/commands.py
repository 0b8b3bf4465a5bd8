"""Commands on agents: run, chat, and sessions (list, read and remove recorded conversations)."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from smokebox.cli.options import AsJson, subcommands

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from smokebox.agents.agent import Agent
    from smokebox.agents.log.records import StoredRecord
    from smokebox.agents.log.store import SessionKey, SessionStore, SessionSummary
    from smokebox.cli.agents.views import EventView


SandboxChoice = Annotated[
    str | None,
    typer.Option(
        "--sandbox",
        "-s",
        metavar="virtual|local|ID",
        help="Sandbox to use instead of the file's.",
    ),
]
ModelChoice = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="PROVIDER/MODEL", help="Model to use instead of the file's."
    ),
]
Instance = Annotated[
    str | None, typer.Option("--id", help="Conversation ID; the same ID resumes it.")
]
Continue = Annotated[bool, typer.Option("--continue", "-c", help="Continue the last conversation.")]


def run(
    file: Annotated[str, typer.Argument(help="Python file with an agent, or name of a workflow.")],
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt for the agent; - reads it from stdin.")
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE|-", help="Input of the workflow."),
    ] = None,
    sandbox: SandboxChoice = None,
    model: ModelChoice = None,
    id: Instance = None,
    resume: Continue = False,
    session: Annotated[str, typer.Option(help="Session of the conversation.")] = "default",
    json: Annotated[bool, typer.Option("--json", help="Print each event as JSON.")] = False,
) -> int:
    """Prompt an agent, or run a workflow of this project.

    Prints the agent's text, or the workflow's result as JSON, to stdout and everything else
    to stderr. Ctrl-C aborts. For example:

    smokebox run agent.py "Review document.md." --sandbox local

    smokebox run review --payload @plan.json
    """
    import asyncio

    if prompt is None:
        return _run_workflow(file, payload)
    from smokebox.agents.agent_file import load_agent
    from smokebox.cli.agents.views import JsonView, TextView

    text = sys.stdin.read() if prompt == "-" else prompt
    agent = load_agent(file)
    view: EventView = JsonView() if json else TextView()
    return asyncio.run(_prompt(agent, text, view, sandbox, model, id, resume, session))


def _run_workflow(name: str, payload: str | None) -> int:
    from pathlib import Path

    from smokebox.cli.project.workflow import run_workflow
    from smokebox.errors import InvalidOption

    if name.endswith(".py") and not Path(name).parent.name == "workflows":
        raise InvalidOption(
            f"there is no prompt for the agent of {name}.",
            hint=f'Pass one: smokebox run {name} "..."; a workflow is run by its name.',
            option="prompt",
        )
    return run_workflow(name.removesuffix(".py").rpartition("/")[2], payload, folder=Path.cwd())


async def _prompt(
    agent: Any,
    text: str,
    view: EventView,
    sandbox: str | None,
    model: str | None,
    id: str | None,
    resume: bool,
    name: str,
) -> int:
    from smokebox.cli.agents.conversation import open_harness, resume_unfinished, watch

    async with open_harness(agent, sandbox=sandbox, model=model, id=id, resume=resume) as harness:
        session = await harness.session(name)
        await resume_unfinished(session, view)
        return await watch(session, session.prompt(text), view)


MODEL = "SMOKEBOX_MODEL"


def chat(
    file: Annotated[
        str | None,
        typer.Argument(
            help="Python file with an agent; without it, an agent with default settings."
        ),
    ] = None,
    sandbox: SandboxChoice = None,
    model: ModelChoice = None,
    id: Instance = None,
    resume: Continue = False,
) -> int:
    """Chat with an agent.

    Ctrl-C aborts a reply, Ctrl-D ends the conversation; `smokebox chat --continue` resumes
    it.
    """
    import asyncio

    agent = _load_agent(file, model)
    return asyncio.run(_converse(agent, sandbox, model, id, resume))


def _load_agent(file: str | None, model: str | None) -> Agent:
    from smokebox.agents.agent import create_agent
    from smokebox.agents.agent_file import load_agent
    from smokebox.errors import InvalidOption

    if file is not None:
        return load_agent(file)
    chosen = model or os.environ.get(MODEL)
    if not chosen:
        raise InvalidOption(
            "no model is configured.",
            hint=f"Pass --model PROVIDER/MODEL, set {MODEL}, or pass a file with an agent.",
            option="--model",
        )
    return create_agent(name="chat", model=chosen)


async def _converse(
    agent: Agent, sandbox: str | None, model: str | None, id: str | None, resume: bool
) -> int:
    from smokebox.cli.agents.conversation import (
        open_harness,
        read_line,
        resume_unfinished,
        watch,
    )
    from smokebox.cli.agents.views import TextView
    from smokebox.cli.output import report
    from smokebox.errors import SmokeboxError

    async with open_harness(agent, sandbox=sandbox, model=model, id=id, resume=resume) as harness:
        session: Any = await harness.session()
        await resume_unfinished(session, TextView())
        while (line := await read_line()) is not None:
            if not line.strip():
                continue
            try:
                await watch(session, session.prompt(line.rstrip("\n")), TextView())
            except SmokeboxError as error:
                report(error)
    return 0


T = TypeVar("T")

sessions = subcommands("List, read and remove recorded conversations.")

Store = Annotated[
    str | None,
    typer.Option("--store", metavar="FILE|URL", help="Session store: a file or postgres:// URL."),
]
Name = Annotated[
    str,
    typer.Argument(metavar="SESSION", help="AGENT/ID/NAME, or a unique part of it."),
]
Full = Annotated[
    bool, typer.Option("--full", help="Include thinking and the whole output of tools.")
]


@sessions.command()
def ls(
    as_json: AsJson = False,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only sessions of this agent.")
    ] = None,
    id: Annotated[
        str | None, typer.Option(metavar="ID", help="Only sessions of this conversation.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of sessions.")] = 100,
    store: Store = None,
) -> int:
    """List sessions, most recently changed first."""
    from smokebox.cli.output import format_age, print_json, print_table

    found = _with_store(store, lambda opened: opened.sessions(agent=agent, id=id, limit=limit))
    if as_json:
        print_json(found)
        return 0
    print_table(
        ("SESSION", "RECORDS", "UNFINISHED", "CREATED", "CHANGED", "PARENT"),
        [
            (
                str(one.key),
                str(one.head),
                str(one.unfinished) if one.unfinished else "-",
                format_age(one.created_at),
                format_age(one.updated_at),
                one.parent or "-",
            )
            for one in found
        ],
    )
    return 0


@sessions.command()
def show(session: Name, full: Full = False, as_json: AsJson = False, store: Store = None) -> int:
    """Print a conversation."""
    from smokebox.cli.agents.views import RecordView

    if as_json:
        return export(session, store)
    view = RecordView(full=full)

    async def work(opened: SessionStore) -> None:
        async for stored in _records(opened, session):
            view.show(stored)

    _with_store(store, work)
    return 0


@sessions.command()
def tail(
    session: Name,
    full: Full = False,
    records: Annotated[
        int, typer.Option("--records", "-n", min=0, help="Number of last records to start with.")
    ] = 20,
    store: Store = None,
) -> int:
    """Print the end of a conversation and follow it until Ctrl-C."""
    from smokebox.cli.agents.views import RecordView

    view = RecordView(full=full)

    async def work(opened: SessionStore) -> None:
        found = await _find(opened, session)
        async for stored in opened.follow(found.key, after=max(0, found.head - records)):
            view.show(stored)
            sys.stdout.flush()

    _with_store(store, work)
    return 0


@sessions.command()
def export(session: Name, store: Store = None) -> int:
    """Print all records of a session as JSON lines."""
    import msgspec

    async def work(opened: SessionStore) -> None:
        async for stored in _records(opened, session):
            typer.echo(msgspec.json.encode(stored))

    _with_store(store, work)
    return 0


@sessions.command()
def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="SESSION...", help="Sessions, as `sessions ls` prints.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Remove a session even if an agent is using it.")
    ] = False,
    store: Store = None,
) -> int:
    """Remove sessions, their records and tasks."""

    async def work(opened: SessionStore) -> None:
        for name in names:
            key = (await _find(opened, name)).key
            if not force:
                await _check_unused(opened, key)
            await opened.delete(key)

    _with_store(store, work)
    return 0


def _with_store(location: str | None, work: Callable[[SessionStore], Awaitable[T]]) -> T:
    import asyncio

    from smokebox.agents.log.persistence import open_store
    from smokebox.cli.project.folder import project_store
    from smokebox.errors import NotFound

    if location is not None and "://" not in location and not os.path.exists(location):
        raise NotFound(
            f"there is no session store {location}.",
            hint="Omit --store to use that of the project or the state directory.",
            kind="store",
            name=location,
        )

    async def run() -> T:
        store = open_store(project_store() or True if location is None else location)
        try:
            return await work(store)
        finally:
            await store.aclose()

    return asyncio.run(run())


async def _records(store: SessionStore, name: str) -> AsyncIterator[StoredRecord]:
    key = (await _find(store, name)).key
    after = 0
    while page := await store.read(key, after=after):
        for stored in page:
            yield stored
        after = page[-1].offset


async def _find(store: SessionStore, name: str) -> SessionSummary:
    """Return the session of that name, or the only one that the name is a part of."""
    from smokebox.errors import NotFound

    known = await store.sessions(limit=100_000)
    for fits in (str.__eq__, str.startswith, str.__contains__):
        matches = [one for one in known if fits(str(one.key), name)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            some = ", ".join([str(one.key) for one in matches[:3]] + ["..."] * (len(matches) > 3))
            raise NotFound(
                f"{name!r} matches {len(matches)} sessions: {some}.",
                hint="Pass more of the name.",
                kind="session",
                name=name,
            )
    raise NotFound(
        f"there is no session {name!r}.",
        hint="`smokebox sessions ls` lists them.",
        kind="session",
        name=name,
    )


async def _check_unused(store: SessionStore, key: SessionKey) -> None:
    from smokebox.errors import SessionBusy

    try:
        writer = await store.open(key)
    except SessionBusy as error:
        raise SessionBusy(
            error.message, hint="Wait, or remove it with --force.", session=str(key)
        ) from error
    await writer.release()
