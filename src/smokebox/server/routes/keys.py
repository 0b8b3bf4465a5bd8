"""API keys: made, listed, revoked. For administrators."""

from __future__ import annotations

from smokebox.errors import InvalidOption, NotFound
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.wire.answers import Keys, NewKey
from smokebox.wire.requests import CreateKey


@endpoint("GET", "/keys", admin=True)
async def list_all(call: Call) -> Keys:
    """List the API keys, without their secrets."""
    return Keys(call.state.keys.all())


@endpoint("POST", "/keys", errors=(InvalidOption,), status=201, admin=True)
async def create(call: Call, body: CreateKey) -> NewKey:
    """Make an API key.

    Its secret is in this answer and never again. Without a prefix it opens every sandbox, and
    what is for administrators only with `admin`.
    """
    return await call.state.keys.create(body)


@endpoint("DELETE", "/keys/{key}", errors=(NotFound,), admin=True)
async def revoke(call: Call) -> None:
    """Revoke an API key, by its id. What it has begun goes on."""
    await call.state.keys.revoke(call.part("key"))


ENDPOINTS = [list_all, create, revoke]
