"""The HTTP side of the door: opens TLS in the name of the server, and serves what comes."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from smokebox.egress.pattern import normal_host
from smokebox.engine.egress.http.conversation import Conversation
from smokebox.engine.egress.http.target import Origin
from smokebox.engine.egress.http.wire import Cut, Wire

if TYPE_CHECKING:
    from smokebox.engine.egress.arrival import Arrival
    from smokebox.engine.egress.http.doorway import Doorway

_HANDSHAKE_SECONDS = 10.0
# How long a program may keep a connection open without a word.
_PATIENCE = 300.0


async def serve(door: Doorway, arrival: Arrival) -> None:
    """Serve one connection until it ends, and close it."""
    host = arrival.host or arrival.sni or arrival.address
    origin = Origin(normal_host(host), arrival.port, arrival.hello)
    if refusal := _refusal(arrival):
        _note(door, origin, refusal)
        arrival.sock.close()
        return
    task = asyncio.current_task()
    assert task is not None
    wire = Wire(patience=_PATIENCE)
    try:
        if not await _open(door, arrival, origin, wire):
            return
        # What is done for a program that left is not done to its end.
        await Conversation(door, wire, origin, task.cancel).run()
        if isinstance(wire.error, ssl.SSLError):
            _note(door, origin, _why(wire.error))
    except (Cut, TimeoutError):
        wire.abort()
    except asyncio.CancelledError:
        wire.abort()
        if not wire.left or task.uncancel() > 0:
            raise
    except BaseException:
        wire.abort()
        raise
    else:
        wire.close()


def _refusal(arrival: Arrival) -> str:
    """Why a connection is not even opened."""
    if not arrival.hello:
        return "" if arrival.port != 443 else "what came to port 443 is not TLS"
    if arrival.sni is None:
        return "TLS without a server name (SNI) cannot be judged"
    if arrival.host is not None and normal_host(arrival.sni) != normal_host(arrival.host):
        return f"TLS names {arrival.sni!r:.100}, and the connection goes to {arrival.host}"
    return ""


async def _open(door: Doorway, arrival: Arrival, origin: Origin, wire: Wire) -> bool:
    loop = asyncio.get_running_loop()
    context = door.authority.context_for(origin.host) if origin.tls else None
    try:
        await loop.connect_accepted_socket(
            lambda: wire,
            arrival.sock,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS if context else None,
        )
    except (OSError, TimeoutError) as error:
        arrival.sock.close()
        _note(door, origin, _why(error))
        return False
    return True


def _why(error: Exception) -> str:
    # In TLS 1.3 a program says so when all is said and done here.
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return "the program does not trust the door's certificate; pass_through= would pass it"
    return "the program broke off TLS with the door; it may not trust its certificate"


def _note(door: Doorway, origin: Origin, reason: str) -> None:
    door.journal.note(
        verdict="refused",
        host=origin.host,
        port=origin.port,
        rule="tls",
        protocol="https" if origin.tls else "http",
        reason=reason,
    )
