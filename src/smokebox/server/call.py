"""One request on its way to an endpoint: who asks, for which sandbox, with which body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.names import check_id
from smokebox.errors import NotFound
from smokebox.wire.codec import whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from smokebox.engine import Host, Sandbox
    from smokebox.server.principal import Principal
    from smokebox.server.state import State


class Call:
    """What an endpoint gets. `sandbox` is set where the path names one."""

    sandbox: Sandbox

    def __init__(self, request: Request, state: State, principal: Principal) -> None:
        self.request = request
        self.state = state
        self.principal = principal

    @property
    def host(self) -> Host:
        """The engine."""
        return self.state.host

    @property
    def request_id(self) -> str:
        """What this request is called in logs and errors."""
        return str(self.request.scope["smokebox.request_id"])

    def part(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    async def find(self) -> None:
        """See that the sandbox of the path is there, and for who asks."""
        id = check_id(self.part("id"))
        self.principal.check_sandbox(id)
        self.sandbox = self.host.sandbox(id)
        if self.sandbox.life.run is None and await self.sandbox.info() is None:
            raise missing(id)

    async def body(self) -> bytes:
        """The whole body of a small request."""
        limit = self.state.settings.max_body
        hint = "Write what is long to a file first: files have no limit."
        return await whole(self.request.stream(), limit, hint=hint)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """A body of any length as it comes."""
        async for piece in self.request.stream():
            if piece:
                yield piece


def missing(id: str) -> NotFound:
    """The error for a sandbox that is not there."""
    return NotFound(
        f"there is no sandbox {id!r}.",
        hint=f"Make it with PUT /api/sandboxes/{id}, or `smokebox create {id}`.",
        kind="sandbox",
        name=id,
    )
