"""The URLs of ports, for who asks the API for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import NotFound
from smokebox.types import ExposedPort
from smokebox.wire.preview import Target

if TYPE_CHECKING:
    from smokebox.engine.ports import PortGrant
    from smokebox.server.endpoint import ApiCall


async def described(call: ApiCall, exposed: PortGrant) -> ExposedPort:
    """A port that was exposed, with where it is seen."""
    target = Target(exposed.port, call.sandbox.id, exposed.token)
    return ExposedPort(
        port=exposed.port,
        url=await _url(call, target),
        token=exposed.token,
        name=exposed.name,
        private=exposed.private,
        status="active" if exposed.active else "stale",
    )


async def url_of(call: ApiCall, port: int, *, expires_at: int | None = None) -> str:
    """The URL of a port that was exposed, or one that is good until then."""
    row = (await call.sandbox.ports.load()).get(port)
    if row is None:
        raise NotFound(
            f"port {port} of sandbox {call.sandbox.id} was unexposed meanwhile.",
            hint="Expose it again.",
            kind="port",
            name=str(port),
        )
    signer = call.state.previews.signer
    token = row.token if expires_at is None else signer.sign(row, expires_at)
    return await _url(call, Target(port, call.sandbox.id, token))


async def _url(call: ApiCall, target: Target) -> str:
    previews = call.state.previews
    server = call.request.scope["server"]
    by_socket = server is None or server[1] is None
    asked_by = None if by_socket else call.request.headers.get("host")
    return previews.sites.url(target, port=await previews.listen(), asked_by=asked_by)
