"""Sandboxes by id: made, listed, changed, put to sleep, destroyed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from smokebox.engine.names import check_id
from smokebox.errors import (
    Conflict,
    InvalidOption,
    IsolationUnavailable,
    LimitReached,
    NotFound,
    SandboxGone,
    ServiceUnavailable,
    SmokeboxError,
)
from smokebox.server.call import Call, missing
from smokebox.server.endpoint import endpoint
from smokebox.server.idempotency import Making, taken
from smokebox.server.routes.network import egress_of
from smokebox.types import Capabilities, SandboxInfo, SandboxStats
from smokebox.wire.answers import Sandboxes
from smokebox.wire.requests import CreateSandbox, Egress, ListSandboxes, Settings

if TYPE_CHECKING:
    from smokebox.engine import Sandbox

_MAKING = (
    InvalidOption,
    NotFound,
    Conflict,
    LimitReached,
    IsolationUnavailable,
    ServiceUnavailable,
    SandboxGone,
)


@endpoint("GET", "/sandboxes", errors=(InvalidOption,))
async def list_all(call: Call, query: ListSandboxes) -> Sandboxes:
    """List sandboxes, by id. Wakes none."""
    prefix, own = query.prefix, call.principal.prefix
    if not prefix.startswith(own):
        if not own.startswith(prefix):
            return Sandboxes([])
        prefix = own
    found = await call.host.list(status=query.status, labels=_labels(query.label), prefix=prefix)
    return Sandboxes(found)


@endpoint("POST", "/sandboxes", errors=_MAKING, status=201, slow=True)
async def create(call: Call, body: CreateSandbox) -> SandboxInfo:
    """Make a sandbox that is not there yet, by default under a random id.

    With the header Idempotency-Key it may be repeated, and makes one.
    """
    id = body.id if body.id is not None else call.principal.random_id()
    call.principal.check_sandbox(check_id(id))

    async def make(id: str) -> SandboxInfo:
        if await call.host.sandbox(id).info() is not None:
            raise taken("sandbox", id)
        sandbox = await _named(call, id, body)
        try:
            return await _made(sandbox)
        except (SmokeboxError, asyncio.CancelledError):
            if body.id is None:
                # Nobody knows its id, and nobody would remove what there is of it.
                await sandbox.destroy()
            raise

    async def find(id: str) -> SandboxInfo:
        return await _info(call.host.sandbox(id))

    making = Making(kind="sandbox", id=id, find=find, make=make)
    return await call.state.requests.once(call, body, making)


@endpoint("PUT", "/sandboxes/{id}", errors=_MAKING, finds=False, slow=True)
async def put(call: Call, body: Settings) -> SandboxInfo:
    """Make a sandbox, or have the one that is there be so from its next call on.

    What is left out stays as it is. Its image and tier cannot change.
    """
    sandbox = await _named(call, call.part("id"), body)
    return await _info(sandbox) if await sandbox.info() is not None else await _made(sandbox)


@endpoint("GET", "/sandboxes/{id}")
async def get(call: Call) -> SandboxInfo:
    """What is known of a sandbox. Does not wake it."""
    return await _info(call.sandbox)


@endpoint("DELETE", "/sandboxes/{id}", finds=False, slow=True)
async def destroy(call: Call) -> None:
    """Destroy a sandbox with all that is in it. One that is not there is fine."""
    id = check_id(call.part("id"))
    call.principal.check_sandbox(id)
    await call.host.sandbox(id).destroy()


@endpoint("POST", "/sandboxes/{id}/wake", errors=_MAKING, slow=True)
async def wake(call: Call) -> SandboxInfo:
    """Start a sandbox that sleeps. Any call that needs it does that too."""
    await call.sandbox.wake()
    return await _info(call.sandbox)


@endpoint("POST", "/sandboxes/{id}/sleep", slow=True)
async def sleep(call: Call) -> SandboxInfo:
    """End the processes of a sandbox and keep its files."""
    await call.sandbox.sleep()
    return await _info(call.sandbox)


@endpoint("GET", "/sandboxes/{id}/stats")
async def stats(call: Call) -> SandboxStats:
    """What a sandbox uses at this moment. Does not wake it."""
    return await call.sandbox.stats()


@endpoint("GET", "/sandboxes/{id}/capabilities", errors=_MAKING, slow=True)
async def capabilities(call: Call) -> Capabilities:
    """What a sandbox can and cannot do."""
    return await call.sandbox.capabilities()


async def given(call: Call, body: Settings) -> dict[str, Any]:
    """The options of a sandbox that a body has. Raises `Forbidden` for what is not for all."""
    names = set(Settings.__struct_fields__) - set(Egress.__struct_fields__)
    fields = {name: getattr(body, name) for name in names}
    options = {name: value for name, value in fields.items() if value is not None}
    if egress := await egress_of(call.principal, body):
        options["egress"] = egress
    return options


async def _named(call: Call, id: str, body: Settings) -> Sandbox:
    call.principal.check_sandbox(check_id(id))
    return call.host.sandbox(id, **await given(call, body))


async def _made(sandbox: Sandbox) -> SandboxInfo:
    await sandbox.wake()
    return await _info(sandbox)


async def _info(sandbox: Sandbox) -> SandboxInfo:
    info = await sandbox.info()
    if info is None:
        raise missing(sandbox.id)
    return info


def _labels(given: list[str]) -> dict[str, str]:
    labels = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidOption(
                f"a label is NAME=VALUE, not {text!r}.",
                hint="Pass for example label=team=search.",
                option="label",
                value=text,
            )
        labels[name] = value
    return labels


ENDPOINTS = [get, list_all, create, put, destroy, wake, sleep, stats, capabilities]
