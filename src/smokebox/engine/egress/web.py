"""HTTP connections of a sandbox: end TLS in the server's name, then serve requests."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from smokebox.egress.pattern import normal_host
from smokebox.engine.egress.http.proxy_connection import ProxyConnection
from smokebox.engine.egress.http.target import Origin
from smokebox.foundation.http1.connection import Connection, ConnectionLost

if TYPE_CHECKING:
    from smokebox.engine.egress.http.context import ProxyContext
    from smokebox.engine.egress.listener import IncomingConnection

_HANDSHAKE_SECONDS = 10.0
# How long a program may keep a connection open without a word.
_SILENCE_SECONDS = 300.0


async def serve(proxy: ProxyContext, incoming: IncomingConnection) -> None:
    """Serve one connection until it ends, and close it."""
    host = incoming.host or incoming.sni or incoming.address
    origin = Origin(normal_host(host), incoming.port, incoming.hello)
    if refusal := _refusal(incoming):
        _note(proxy, origin, refusal)
        incoming.sock.close()
        return
    task = asyncio.current_task()
    assert task is not None
    connection = Connection(timeout=_SILENCE_SECONDS)
    try:
        if not await _open(proxy, incoming, origin, connection):
            return
        # What is done for a program that left is not done to its end.
        await ProxyConnection(proxy, connection, origin, task.cancel).run()
        if isinstance(connection.error, ssl.SSLError):
            _note(proxy, origin, _why(connection.error))
    except (ConnectionLost, TimeoutError):
        connection.abort()
    except asyncio.CancelledError:
        connection.abort()
        if not connection.lost or task.uncancel() > 0:
            raise
    except BaseException:
        connection.abort()
        raise
    else:
        connection.close()


def _refusal(incoming: IncomingConnection) -> str:
    """Why a connection is not even opened."""
    if not incoming.hello:
        return "" if incoming.port != 443 else "what came to port 443 is not TLS"
    if incoming.sni is None:
        return "TLS without a server name (SNI) cannot be judged"
    if incoming.host is not None and normal_host(incoming.sni) != normal_host(incoming.host):
        return f"TLS names {incoming.sni!r:.100}, and the connection goes to {incoming.host}"
    return ""


async def _open(
    proxy: ProxyContext, incoming: IncomingConnection, origin: Origin, connection: Connection
) -> bool:
    loop = asyncio.get_running_loop()
    context = proxy.authority.context_for(origin.host) if origin.tls else None
    try:
        await loop.connect_accepted_socket(
            lambda: connection,
            incoming.sock,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS if context else None,
        )
    except (OSError, TimeoutError) as error:
        incoming.sock.close()
        _note(proxy, origin, _why(error))
        return False
    return True


def _why(error: Exception) -> str:
    # In TLS 1.3 a program says so when all is said and done here.
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return "the program does not trust the proxy's certificate; pass_through= would pass it"
    return "the program broke off TLS with the proxy; it may not trust its certificate"


def _note(proxy: ProxyContext, origin: Origin, reason: str) -> None:
    proxy.audit_log.note(
        verdict="refused",
        host=origin.host,
        port=origin.port,
        rule="tls",
        protocol="https" if origin.tls else "http",
        reason=reason,
    )
