"""`smokebox sessions`: the conversations of agents that are recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from smokebox.cli.options import AsJson  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.agents.log.store import SessionKey, SessionSummary, Store

T = TypeVar("T")

sessions = typer.Typer(
    help="List, read and remove the conversations of agents.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)

Place = Annotated[
    str | None,
    typer.Option("--store", metavar="PLACE", help="A file, or a postgres:// URL."),
]
Name = Annotated[
    str,
    typer.Argument(metavar="SESSION", help="AGENT/ID/NAME, or as much of it as is unique."),
]
Full = Annotated[bool, typer.Option("--full", help="Also thoughts, and all that tools gave.")]


@sessions.command()
def ls(
    as_json: AsJson = False,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Only of that agent.")] = None,
    id: Annotated[str | None, typer.Option(metavar="ID", help="Only of that instance.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    place: Place = None,
) -> int:
    """List sessions, those that changed last first."""
    from smokebox.cli.table import ago, print_json, print_table

    found = _with_store(place, lambda store: store.sessions(agent=agent, id=id, limit=limit))
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
                ago(one.created_at),
                ago(one.updated_at),
                one.parent or "-",
            )
            for one in found
        ],
    )
    return 0


@sessions.command()
def show(session: Name, full: Full = False, as_json: AsJson = False, place: Place = None) -> int:
    """Print a conversation."""
    from smokebox.cli.recorded import RecordView

    if as_json:
        return export(session, place)
    view = RecordView(full=full)

    async def work(store: Store) -> None:
        key = (await _find(store, session)).key
        after = 0
        while page := await store.read(key, after=after):
            for stored in page:
                view.show(stored)
            after = page[-1].offset

    _with_store(place, work)
    return 0


@sessions.command()
def tail(
    session: Name,
    full: Full = False,
    records: Annotated[
        int, typer.Option("--records", "-n", min=0, help="Begin with so many of the last.")
    ] = 20,
    place: Place = None,
) -> int:
    """Print the end of a conversation, and go on with what is added until Ctrl-C."""
    import sys

    from smokebox.cli.recorded import RecordView

    view = RecordView(full=full)

    async def work(store: Store) -> None:
        found = await _find(store, session)
        async for stored in store.follow(found.key, after=max(0, found.head - records)):
            view.show(stored)
            sys.stdout.flush()

    _with_store(place, work)
    return 0


@sessions.command()
def export(session: Name, place: Place = None) -> int:
    """Print all records of a session as lines of JSON."""
    import msgspec

    async def work(store: Store) -> None:
        key = (await _find(store, session)).key
        after = 0
        while page := await store.read(key, after=after):
            for stored in page:
                typer.echo(msgspec.json.encode(stored))
            after = page[-1].offset

    _with_store(place, work)
    return 0


@sessions.command()
def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="SESSION...", help="As `sessions ls` has them.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also one that an agent works in.")
    ] = False,
    place: Place = None,
) -> int:
    """Remove sessions with their records and tasks."""

    async def work(store: Store) -> None:
        for name in names:
            key = (await _find(store, name)).key
            if not force:
                await _see_it_is_free(store, key)
            await store.delete(key)

    _with_store(place, work)
    return 0


def _with_store(place: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    import asyncio
    import os

    from smokebox.agents.log.opening import open_store
    from smokebox.cli.project.place import project_store
    from smokebox.errors import NotFound

    if place is not None and "://" not in place and not os.path.exists(place):
        raise NotFound(
            f"no sessions are kept in {place}.",
            hint="Without --store it is that of the project, or of the state directory.",
            kind="store",
            name=place,
        )

    async def run() -> T:
        store = open_store(project_store() or True if place is None else place)
        try:
            return await work(store)
        finally:
            await store.aclose()

    return asyncio.run(run())


async def _find(store: Store, name: str) -> SessionSummary:
    """The session that is meant: by its whole name, or the only one that has it as a part."""
    from smokebox.errors import NotFound

    known = await store.sessions(limit=100_000)
    for fits in (str.__eq__, str.startswith, str.__contains__):
        found = [one for one in known if fits(str(one.key), name)]
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join([str(one.key) for one in found[:3]] + ["..."] * (len(found) > 3))
            raise NotFound(
                f"{name!r} is not one session but {len(found)}: {some}.",
                hint="Write more of the name.",
                kind="session",
                name=name,
            )
    raise NotFound(
        f"there is no session {name!r}.",
        hint="`smokebox sessions ls` lists them.",
        kind="session",
        name=name,
    )


async def _see_it_is_free(store: Store, key: SessionKey) -> None:
    from smokebox.errors import SessionBusy

    try:
        writer = await store.open(key)
    except SessionBusy as error:
        raise SessionBusy(
            error.message, hint="Wait, or remove it with --force.", session=str(key)
        ) from error
    await writer.release()
