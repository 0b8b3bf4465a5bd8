"""API keys. Only administrators may manage them."""

from __future__ import annotations

import msgspec

from smokebox.errors import Conflict, InvalidOption, NotFound
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.wire.requests import CreateKey
from smokebox.wire.responses import KeyDetails, Keys, NewKey


@endpoint("GET", "/keys", admin=True)
async def list_all(call: ApiCall) -> Keys:
    """List the API keys, without their secrets."""
    return Keys(call.state.keys.all())


@endpoint("POST", "/keys", errors=(InvalidOption, Conflict), status=201, admin=True)
async def create(call: ApiCall, body: CreateKey) -> NewKey:
    """Create an API key.

    The secret is only in this response. A prefix ends in `-`, which is added if missing; without
    one the key is for every sandbox. A prefix that overlaps with one of another tenant is a
    conflict, unless `overlap` is set. Requests for administrators need a key with `admin`.
    """
    return await call.state.keys.create(body)


@endpoint("GET", "/keys/{key}", errors=(NotFound,), admin=True)
async def get(call: ApiCall) -> KeyDetails:
    """Return an API key with its ceilings, and what it uses of its quotas."""
    id = call.path_param("key")
    info, principal = call.state.keys.get(id), call.state.keys.principal_of(id)
    profile = principal.profile
    return KeyDetails(
        **msgspec.structs.asdict(info),
        ceilings={} if profile is None else profile.describe(),
        quotas=await call.state.quotas.use(principal),
    )


@endpoint("DELETE", "/keys/{key}", errors=(NotFound,), admin=True)
async def revoke(call: ApiCall) -> None:
    """Revoke an API key by its id. Its running requests, streams and terminals end."""
    await call.state.keys.revoke(call.path_param("key"))
    call.state.running.cut_ended(call.state.keys)


ENDPOINTS = [list_all, create, get, revoke]
