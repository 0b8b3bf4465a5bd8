"""API keys. Only administrators may manage them."""

from __future__ import annotations

from smokebox.errors import InvalidOption, NotFound
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.wire.requests import CreateKey
from smokebox.wire.responses import Keys, NewKey


@endpoint("GET", "/keys", admin=True)
async def list_all(call: ApiCall) -> Keys:
    """List the API keys, without their secrets."""
    return Keys(call.state.keys.all())


@endpoint("POST", "/keys", errors=(InvalidOption,), status=201, admin=True)
async def create(call: ApiCall, body: CreateKey) -> NewKey:
    """Create an API key.

    The secret is only in this response. Without a prefix the key is for every sandbox. Requests
    for administrators need a key with `admin`.
    """
    return await call.state.keys.create(body)


@endpoint("DELETE", "/keys/{key}", errors=(NotFound,), admin=True)
async def revoke(call: ApiCall) -> None:
    """Revoke an API key by its id. Its running requests, streams and terminals end."""
    key = call.path_param("key")
    await call.state.keys.revoke(key)
    call.state.running.cut(key)


ENDPOINTS = [list_all, create, revoke]
