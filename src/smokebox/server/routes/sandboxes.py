"""Sandboxes: creation, settings, sleep and removal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from smokebox.engine.names import check_id, random_id
from smokebox.engine.options import split_image
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
from smokebox.server.endpoint import ApiCall, endpoint, sandbox_not_found
from smokebox.server.idempotency import Creation, taken
from smokebox.server.routes.network import allowed_egress
from smokebox.server.routes.snapshots import find_snapshot
from smokebox.server.tenancy.ceilings import check_options
from smokebox.types import Capabilities, SandboxInfo, SandboxStats
from smokebox.wire.requests import CreateSandbox, ListSandboxes, Settings
from smokebox.wire.responses import Sandboxes

if TYPE_CHECKING:
    from smokebox.engine import Sandbox

_CREATE_ERRORS = (
    InvalidOption,
    NotFound,
    Conflict,
    LimitReached,
    IsolationUnavailable,
    ServiceUnavailable,
    SandboxGone,
)


@endpoint("GET", "/sandboxes", errors=(InvalidOption,))
async def list_all(call: ApiCall, query: ListSandboxes) -> Sandboxes:
    """List sandboxes, sorted by id. Does not wake them."""
    prefix, own = query.prefix, call.principal.prefix
    if not prefix.startswith(own):
        if not own.startswith(prefix):
            return Sandboxes([])
        prefix = own
    found = await call.host.list(status=query.status, labels=_labels(query.label), prefix=prefix)
    return Sandboxes(found)


@endpoint("POST", "/sandboxes", errors=_CREATE_ERRORS, status=201, slow=True)
async def create(call: ApiCall, body: CreateSandbox) -> SandboxInfo:
    """Create a sandbox, by default with a random id. An id that is taken is a conflict.

    With the header Idempotency-Key the request may be repeated, and creates one sandbox.
    """
    id = body.id if body.id is not None else call.principal.prefix + random_id()
    call.principal.check_sandbox(check_id(id))

    async def create_with_id(id: str) -> SandboxInfo:
        if await call.host.sandbox(id).info() is not None:
            raise taken("sandbox", id)
        sandbox = call.host.sandbox(id, **await sandbox_options(call, body))
        try:
            return await _wake(sandbox)
        except (SmokeboxError, asyncio.CancelledError):
            if body.id is None:
                # The client does not know its id, so it could not remove it.
                await sandbox.destroy()
            raise

    async def find(id: str) -> SandboxInfo:
        return await _info(call.host.sandbox(id))

    return await call.state.idempotency.once(
        call, body, Creation(kind="sandbox", id=id, find=find, create=create_with_id)
    )


@endpoint("PUT", "/sandboxes/{id}", errors=_CREATE_ERRORS, needs_sandbox=False, slow=True)
async def put(call: ApiCall, body: Settings) -> SandboxInfo:
    """Create a sandbox, or change the settings of an existing one for its next calls.

    Settings left out keep their value. The image and the tier cannot be changed.
    """
    id = call.path_param("id")
    call.principal.check_sandbox(check_id(id))
    options = await sandbox_options(call, body)
    async with call.state.quotas.resize(call.principal, id, options.get("limits")):
        sandbox = call.host.sandbox(id, **options)
        # Reading the row applies the options to an existing sandbox.
        return await _info(sandbox) if await sandbox.info() is not None else await _wake(sandbox)


@endpoint("GET", "/sandboxes/{id}")
async def get(call: ApiCall) -> SandboxInfo:
    """Return the state of a sandbox. Does not wake it."""
    return await _info(call.sandbox)


@endpoint("DELETE", "/sandboxes/{id}", needs_sandbox=False, slow=True)
async def destroy(call: ApiCall) -> None:
    """Destroy a sandbox and its files. Succeeds if there is none."""
    id = check_id(call.path_param("id"))
    call.principal.check_sandbox(id)
    await call.host.sandbox(id).destroy()


@endpoint("POST", "/sandboxes/{id}/wake", errors=_CREATE_ERRORS, slow=True)
async def wake(call: ApiCall) -> SandboxInfo:
    """Wake a sleeping sandbox. Calls that need it to run do this too."""
    await call.sandbox.wake()
    return await _info(call.sandbox)


@endpoint("POST", "/sandboxes/{id}/sleep", slow=True)
async def sleep(call: ApiCall) -> SandboxInfo:
    """Put a sandbox to sleep: end its processes and keep its files."""
    await call.sandbox.sleep()
    return await _info(call.sandbox)


@endpoint("GET", "/sandboxes/{id}/stats")
async def stats(call: ApiCall) -> SandboxStats:
    """Return the resource usage of a sandbox. Does not wake it."""
    return await call.sandbox.stats()


@endpoint("GET", "/sandboxes/{id}/capabilities", errors=_CREATE_ERRORS, slow=True)
async def capabilities(call: ApiCall) -> Capabilities:
    """Return the capabilities of a sandbox."""
    return await call.sandbox.capabilities()


async def sandbox_options(call: ApiCall, body: Settings) -> dict[str, Any]:
    """Return the options that a body sets. Raises `Forbidden` for ones the key may not use."""
    fields = {name: getattr(body, name) for name in Settings.__struct_fields__}
    options = {name: value for name, value in fields.items() if value is not None}
    if body.egress is not None:
        options["egress"] = await allowed_egress(call, body.egress)
    options = split_image(options)
    if "snapshot" in options:
        # From here on by its id, as names are those of the key.
        options["snapshot"] = await _snapshot_id(call, str(options["snapshot"]))
    return check_options(call.principal, options, call.state.settings)


async def _snapshot_id(call: ApiCall, name: str) -> str:
    try:
        return (await find_snapshot(call, name)).id
    except NotFound:
        if "id" in call.request.path_params:
            # A sandbox that exists does not need the snapshot that it was created from.
            info = await call.host.sandbox(check_id(call.path_param("id"))).info()
            if info is not None and info.snapshot is not None:
                return info.snapshot
        raise


async def _wake(sandbox: Sandbox) -> SandboxInfo:
    await sandbox.wake()
    return await _info(sandbox)


async def _info(sandbox: Sandbox) -> SandboxInfo:
    info = await sandbox.info()
    if info is None:
        raise sandbox_not_found(sandbox.id)
    return info


def _labels(texts: list[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
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
