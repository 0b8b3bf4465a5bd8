"""URLs of exposed ports, for responses of the API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import NotFound
from smokebox.types import ExposedPort
from smokebox.wire.preview import PreviewTarget

if TYPE_CHECKING:
    from smokebox.engine.ports import PortGrant
    from smokebox.server.endpoint import ApiCall


async def exposed_port(call: ApiCall, grant: PortGrant) -> ExposedPort:
    """Return an exposed port with its URL."""
    target = PreviewTarget(grant.port, call.sandbox.id, slug=grant.slug, token=grant.token)
    return ExposedPort(
        port=grant.port,
        url=await _url(call, target),
        label=target.label,
        token=grant.token,
        name=grant.name,
        private=grant.private,
        status="active" if grant.active else "stale",
    )


async def preview_url(call: ApiCall, port: int, *, expires_at: int | None = None) -> str:
    """Return the URL of an exposed port; with `expires_at`, one that is valid until then."""
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
    return await _url(call, PreviewTarget(port, call.sandbox.id, slug=row.slug, token=token))


async def _url(call: ApiCall, target: PreviewTarget) -> str:
    previews = call.state.previews
    server = call.request.scope["server"]
    is_unix = server is None or server[1] is None
    host = None if is_unix else call.request.headers.get("host")
    return previews.names.url(target, port=await previews.listen(), requested_host=host)
