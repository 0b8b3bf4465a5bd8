"""A server that runs in this process until a signal stops it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import typer
import uvloop

from smokebox import __version__
from smokebox.cli.welcome import welcome
from smokebox.errors import Conflict
from smokebox.server.serving import Running, running

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from smokebox.server.settings import Settings

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def run(settings: Settings, *, show: bool) -> None:
    """Serve; with `show`, prove that it works and say what to try next."""
    try:
        uvloop.run(_serve(settings, show=show))
    except Conflict as error:
        if error.fields.get("kind") == "home":
            error.hint = "`smokebox status` says what it is, `smokebox down` stops it."
        raise


async def _serve(settings: Settings, *, show: bool) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        told.set()
        # The next one is not waited for: sandboxes outlive a server that is killed.
        for number in _STOPPING:
            loop.remove_signal_handler(number)

    for number in _STOPPING:
        loop.add_signal_handler(number, stop)
    async with running(settings) as server:
        typer.echo(f"smokebox {__version__} serves {_places(server)}")
        if show:
            await _either(told, welcome(server.socket, server.url))
        await told.wait()


def _places(server: Running) -> str:
    socket = f"unix:{server.socket}"
    return socket if server.url is None else f"{server.url} and {socket}"


async def _either(told: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do the work, unless the event comes first."""
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait((doing, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        doing.cancel()
        await asyncio.wait((doing, waiting))
    if not doing.cancelled():
        doing.result()
