"""Ports of this machine that lead to ports of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import typer

from smokebox.client.tunnel import carry
from smokebox.errors import SmokeboxError
from smokebox.wire.listening import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from smokebox.client.sandbox import Sandbox

_ADDRESS = "127.0.0.1"


async def forwarding(sandbox: Sandbox, ports: Sequence[tuple[int, int]]) -> None:
    """Listen on the first of each pair, for connections to the second; without an end."""
    with contextlib.ExitStack() as stack:
        # All or none: who sees the first line can use them.
        listeners = [stack.enter_context(_listen(here)) for here, _ in ports]
        async with asyncio.TaskGroup() as group:
            for listener, (_, there) in zip(listeners, ports, strict=True):
                here = listener.getsockname()[1]
                typer.echo(f"{_ADDRESS}:{here} leads to port {there} of {sandbox.id}")
                group.create_task(_accept(listener, sandbox, there))


async def _accept(listener: socket.socket, sandbox: Sandbox, port: int) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        while True:
            connection, _ = await loop.sock_accept(listener)
            group.create_task(_carry(connection, sandbox, port))


async def _carry(connection: socket.socket, sandbox: Sandbox, port: int) -> None:
    """See one connection to its end. What is wrong with it is wrong with it alone."""
    with connection:
        connection.setblocking(False)
        try:
            await carry(sandbox, port, connection)
        except (SmokeboxError, OSError) as error:
            typer.echo(f"smokebox: {error}", err=True)


def _listen(port: int) -> socket.socket:
    hint = "Use another port in front of the colon, or 0 for any that is free."
    listener = listen(_ADDRESS, port, hint=hint)
    listener.setblocking(False)
    return listener
