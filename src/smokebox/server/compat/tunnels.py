"""Tunnels, which are previews here: a port of a sandbox at a URL."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import msgspec
from starlette.responses import Response

from smokebox.server.call import Call
from smokebox.server.compat.ids import sandbox_of
from smokebox.server.compat.messages import answer, decoded
from smokebox.server.compat.refusal import Refusal
from smokebox.server.previews import urls


class TunnelBody(msgspec.Struct):
    """A tunnel that is to be made."""

    name: str | None = None


async def create(call: Call) -> Response:
    """Have a port be seen at a URL. Safe to repeat."""
    data = await call.body()
    body = decoded(TunnelBody, data) if data else TunnelBody()
    call.sandbox = sandbox_of(call.request)
    exposed = await call.sandbox.ports.expose(_port(call), name=body.name)
    url = (await urls.described(call, exposed)).url
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    told = {"id": f"{exposed.port}-{exposed.token}", "port": exposed.port, "url": url}
    told |= {"hostname": urlsplit(url).hostname or "", "createdAt": stamp}
    return answer(told if exposed.name is None else {**told, "name": exposed.name})


async def delete(call: Call) -> Response:
    """Have a port not be seen any more. One that is not is fine."""
    await sandbox_of(call.request).ports.unexpose(_port(call))
    return Response(status_code=204)


def _port(call: Call) -> int:
    text = call.part("port")
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise Refusal(400, f"Invalid port: {text}")
    return int(text)
