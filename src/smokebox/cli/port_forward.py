"""Forwarding of local ports to ports of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import typer

from smokebox.client.port_socket import forward_socket
from smokebox.errors import SmokeboxError
from smokebox.foundation.endpoint import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from smokebox.client.sandbox import Sandbox

_ADDRESS = "127.0.0.1"


async def forward_ports(sandbox: Sandbox, ports: Sequence[tuple[int, int]]) -> None:
    """Forward connections from the first port of each pair to the second, until cancelled."""
    with contextlib.ExitStack() as stack:
        # Listen on all ports before the first line says that they can be used.
        listeners = [stack.enter_context(_listen(local)) for local, _ in ports]
        async with asyncio.TaskGroup() as group:
            for listener, (_, remote) in zip(listeners, ports, strict=True):
                local = listener.getsockname()[1]
                typer.echo(f"Forwarding {_ADDRESS}:{local} to port {remote} of {sandbox.id}")
                group.create_task(_accept(listener, sandbox, remote))


async def _accept(listener: socket.socket, sandbox: Sandbox, port: int) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        while True:
            connection, _ = await loop.sock_accept(listener)
            group.create_task(_forward(connection, sandbox, port))


async def _forward(connection: socket.socket, sandbox: Sandbox, port: int) -> None:
    """Forward one connection to its end. An error ends only this connection."""
    with connection:
        connection.setblocking(False)
        try:
            await forward_socket(sandbox._connection, port, connection)
        except (SmokeboxError, OSError) as error:
            typer.echo(f"smokebox: {error}", err=True)


def _listen(port: int) -> socket.socket:
    hint = "Use another port in front of the colon, or 0 for any that is free."
    listener = listen(_ADDRESS, port, hint=hint)
    listener.setblocking(False)
    return listener
