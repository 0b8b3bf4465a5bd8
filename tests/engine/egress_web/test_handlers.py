"""What handlers do to requests, and what is seen of their secrets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine.egress_web.doors import HOST, TOKEN, echo, open_door, parts, serving
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from engine.egress_web.doors import Authority
    from smokebox.egress.handler import Context
    from smokebox.egress.message import Request


async def inject(request: Request, env: Any, context: Context) -> Request:
    request.headers["authorization"] = f"Bearer {env['TOKEN']}"
    return request


async def test_an_injected_header_is_sent_and_its_echo_scrubbed(authority: Authority) -> None:
    async with serving(echo) as address:
        policy = Egress(outbound_by_host={HOST: inject}, hosts={HOST: address})
        async with open_door(authority, policy) as door:
            answer = await door.get("/")
    status, _, body = parts(answer)
    seen = dict(json.loads(body)["headers"])
    assert status == 200
    assert TOKEN.encode() not in answer
    assert "[redacted]" in seen["authorization"]
