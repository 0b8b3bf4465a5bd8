"""A server that runs in this process until it is stopped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer
import uvloop

from smokebox import __version__
from smokebox.cli.welcome import welcome
from smokebox.errors import Conflict
from smokebox.server import journal
from smokebox.server.serving import Running, serve

if TYPE_CHECKING:
    from smokebox.server.settings import Settings


def run(settings: Settings, *, show: bool) -> None:
    """Serve; with `show`, prove that it works and say what to try next."""

    async def ready(server: Running) -> None:
        socket = f"unix:{server.socket}"
        where = socket if server.url is None else f"{server.url} and {socket}"
        typer.echo(f"smokebox {__version__} serves {where}")
        if show:
            await _unless_stopped(server)

    journal.configure(json=settings.log_json, level="warning" if show else "info")
    try:
        uvloop.run(serve(settings, ready))
    except Conflict as error:
        if error.fields.get("kind") == "home":
            error.hint = "`smokebox status` says what it is, `smokebox down` stops it."
        raise


async def _unless_stopped(server: Running) -> None:
    """Welcome who has started the server, unless that wants it to end already."""
    welcoming = asyncio.create_task(welcome(server))
    stopping = asyncio.create_task(server.state.drain.asked.wait())
    try:
        await asyncio.wait((welcoming, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        welcoming.cancel()
        stopping.cancel()
        await asyncio.wait((welcoming, stopping))
    if not welcoming.cancelled():
        welcoming.result()
