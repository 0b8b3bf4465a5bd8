"""Sandboxes that are made ahead, for whoever operates the server."""

from __future__ import annotations

from starlette.responses import Response

from smokebox.server.call import Call
from smokebox.server.compat.messages import answer, ok


async def stats(call: Call) -> Response:
    """How many sandboxes wait, and how many run."""
    call.principal.check_admin()
    pool = call.host.pool
    assigned = len(await call.host.list(status="active"))
    return answer(
        {
            "warm": pool.ready,
            "assigned": assigned,
            "total": pool.ready + assigned,
            # What is taken is made again at once, so there is no interval.
            "config": {"warmTarget": pool.size, "refreshInterval": 0},
            "maxInstances": None,
        }
    )


async def prime(call: Call) -> Response:
    """Make those that are missing."""
    call.principal.check_admin()
    await call.host.prime()
    return ok()


async def shut_down(call: Call) -> Response:
    """Remove those that wait. The next sandbox that is made has others made."""
    call.principal.check_admin()
    await call.host.pool.empty()
    return ok()
