"""Servers of an attacker, which lead to addresses that a tenant may not reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# This host, its network, and the metadata services of clouds: reached only with a grant.
PRIVATE = (
    "127.0.0.2",
    "localhost",
    "169.254.169.254",
    "10.0.0.1",
    "192.168.0.1",
    "172.17.0.1",
    "100.100.100.200",
    "0.0.0.0",
    "[::1]",
    "[::ffff:7f00:1]",
    "[::ffff:a9fe:a9fe]",
    "[fd00:ec2::254]",
    "[fe80::1]",
)


def respond_with(
    status: int, **headers: str
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a fault of `RegistryProxy` that responds to all requests."""

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers=headers)

    return respond
