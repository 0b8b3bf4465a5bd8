"""Egress of a sandbox: its policy, changes at run time, handlers of clients and the audit log."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, get_type_hints

import msgspec
from msgspec import UNSET

from smokebox.egress.address_guard import AddressGuard
from smokebox.egress.handler import CATCH_ALL, CLIENT
from smokebox.egress.layers import EgressChanges, check_opened
from smokebox.egress.policy import (
    Egress,
    TenantEgress,
    egress_fields,
    handler_key,
    parse_egress,
)
from smokebox.egress.remote_handlers import RemoteHandlers
from smokebox.errors import Forbidden, InvalidOption, LimitReached, SandboxGone
from smokebox.foundation import sse
from smokebox.foundation.http1.dial import is_address, split_address
from smokebox.server.endpoint import ApiCall, endpoint, sandbox_not_found
from smokebox.server.responses import EventResponse, event
from smokebox.server.tenancy.ceilings import check_egress, check_hosts
from smokebox.server.tenancy.handlers import check_handler_allowed
from smokebox.server.websocket import WebSocketChannel, websocket
from smokebox.wire.handlers import ServeFrame, from_client
from smokebox.wire.requests import Body, ChangeEgress, FollowNetworkLog, NetworkLog
from smokebox.wire.responses import EgressInfo, NetworkEvents

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from smokebox.egress.layers import EgressLayers
    from smokebox.engine import Sandbox
    from smokebox.tenancy.principal import Principal

    EgressBody = Body
else:
    # Handlers are names on the wire. All other fields are as the policy declares them.
    _types = get_type_hints(Egress, localns={"HandlerOption": str})
    EgressBody = msgspec.defstruct(
        "Egress",
        [
            (field.name, _types[field.name], msgspec.field(default_factory=dict))
            if field.default is MISSING
            else (field.name, _types[field.name], field.default)
            for field in egress_fields()
        ],
        bases=(Body,),
        namespace={
            "__doc__": "The egress policy of a sandbox; fields left out have their defaults."
            "\n\nHosts are names, addresses or globs. A handler is `package.module:name` of one"
            " that the server imports, for keys of administrators and if the server's configuration"
            " allows it, or `@client` for one that a client runs.\n\n"
            + "\n".join(f"- `{field.name}`: {field.metadata['help']}" for field in egress_fields())
        },
    )

_CHANGE_ERRORS = (InvalidOption, LimitReached, SandboxGone)


@endpoint("GET", "/sandboxes/{id}/egress")
async def get(call: ApiCall) -> EgressInfo:
    """Return the egress policy of a sandbox. Does not wake it."""
    return await _info(call.sandbox)


@endpoint("PUT", "/sandboxes/{id}/egress", errors=_CHANGE_ERRORS, slow=True)
async def put(call: ApiCall, body: EgressBody) -> EgressInfo:
    """Replace the egress policy of a sandbox. Changes made at run time stay and override it."""
    policy = await allowed_egress(call, msgspec.to_builtins(body))
    await call.sandbox.network.configure(policy)
    return await _info(call.sandbox)


@endpoint("POST", "/sandboxes/{id}/egress/changes", errors=_CHANGE_ERRORS, slow=True)
async def change(call: ApiCall, body: ChangeEgress) -> EgressInfo:
    """Change the egress policy at run time, from the next request of the sandbox on.

    Changes survive sleep and restarts of the server, and override the settings.
    """
    handlers = {handler_key(name): handler for name, handler in body.outbound_by_host.items()}
    if body.outbound is not UNSET:
        handlers[CATCH_ALL] = body.outbound
    opened = [host for host in body.allow if isinstance(host, str)]
    named = any(handler is not None for handler in handlers.values())
    check_hosts(call.principal, opened, internet=body.internet is True, handlers=named)
    await check_handlers(call, handlers.values())

    def apply(changes: EgressChanges) -> EgressChanges:
        changes = _change_hosts(changes, body)
        for slot, handler in handlers.items():
            changes = changes.set_handler(slot, handler)
        return changes if body.internet is UNSET else changes.set_internet(body.internet)

    layers = await _layers(call.sandbox)
    for host in body.allow:
        # Refuse the whole change if a glob still denies the host.
        check_opened(replace(layers, changes=apply(layers.changes)).egress(), host)
    await call.sandbox.network.change(apply)
    return await _info(call.sandbox)


@endpoint("DELETE", "/sandboxes/{id}/egress/changes", errors=_CHANGE_ERRORS, slow=True)
async def reset(call: ApiCall) -> EgressInfo:
    """Remove the changes made at run time, so that the settings apply again."""
    await call.sandbox.network.change(lambda _: EgressChanges())
    return await _info(call.sandbox)


@endpoint("GET", "/sandboxes/{id}/egress/log")
async def log(call: ApiCall, query: NetworkLog) -> NetworkEvents:
    """List the network events of a sandbox. Does not wake it."""
    audit_log = await call.sandbox.network.audit_log()
    return NetworkEvents(await audit_log.read(query.after, query.limit))


@endpoint("GET", "/sandboxes/{id}/egress/log/stream", returns=sse.MEDIA)
async def follow_log(call: ApiCall, query: FollowNetworkLog) -> EventResponse:
    """Stream the network events of a sandbox, each when it has ended.

    Events: `request` for each, whose id is the cursor after it. The header Last-Event-ID
    overrides `cursor`. Does not wake the sandbox, nor keep it awake.
    """
    last = call.request.headers.get("last-event-id", "")
    cursor = int(last) if last.isascii() and last.isdigit() else query.cursor
    return EventResponse(call, _log_events(call.sandbox, cursor))


@websocket("/sandboxes/{id}/egress/handlers")
async def handlers(call: ApiCall, channel: WebSocketChannel) -> None:
    """Run egress handlers in a client, while this socket is open.

    The client sends `serve` with the entries that it has handlers for; of several clients the
    latest is used. For each request the server sends `handle`, and the client responds with
    `send`, `respond`, `refuse` or `fail`. Bodies are binary frames, of which `pull` allows more.
    """
    await channel.accept()
    remote = RemoteHandlers(channel.send, trusted=call.principal.admin)
    attachment = _Attachment(call.sandbox, remote)

    async def receive(frame: bytes | str) -> None:
        try:
            received = from_client(frame)
        except ValueError as error:
            raise InvalidOption(
                f"the frame is invalid: {error}.",
                hint="See smokebox.wire.handlers for the frames.",
                option="frame",
            ) from error
        if isinstance(received, ServeFrame):
            attachment.renew()
        await remote.receive(received)

    try:
        with call.state.drain.exempt():
            await channel.run(_run_forever(), receive)
    finally:
        attachment.end()
        await remote.aclose()


async def allowed_egress(call: ApiCall, egress: object) -> Egress:
    """Return the policy of a body, as far as its key may set it.

    Raises `Forbidden` for hosts, handlers and addresses that the key may not use. Names in `hosts`
    are checked when they are looked up.
    """
    policy = parse_egress(egress)
    check_egress(call.principal, policy)
    handlers = [policy.outbound, *policy.outbound_by_host.values()]
    await check_handlers(call, [name for name in handlers if isinstance(name, str)])
    access = call.private_access
    if access is True:
        return policy
    fields = {one.name: getattr(policy, one.name) for one in egress_fields()}
    tenant = TenantEgress(**fields, granted=() if access is False else access)
    for host, address in policy.hosts.items():
        _check_address(call.principal, tenant, host, address)
    return tenant


def _check_address(principal: Principal, policy: TenantEgress, host: str, address: str) -> None:
    name, port = split_address(address)
    guard = AddressGuard.of(policy.granted)
    if is_address(name) and not guard.allows_address(name, port):
        raise Forbidden(
            f"hosts: {host!r} is at {address!r}, which is not a public address of another host.",
            hint="The operator of the server can grant it: `private` in [network] or in the key's "
            "profile, in server.toml.",
            key=principal.id,
            reason="private",
        )


async def check_handlers(call: ApiCall, handlers: Iterable[str | None]) -> None:
    """Check that handlers can be imported, and that the client may run them in the server."""
    principal = call.principal
    for handler in {name for name in handlers if name is not None and name != CLIENT}:
        if not principal.admin:
            raise Forbidden(
                f"the handler {handler!r} would run in the server, which only administrators may.",
                hint="Define it in your program, or use an administrator's key.",
                key=principal.id,
                reason="admin",
            )
        allowed = call.state.settings.handlers
        # Importing the module may take long.
        await asyncio.to_thread(check_handler_allowed, handler, allowed, principal)


class _Attachment:
    """Attachment of a client's handlers to a sandbox, also if it is created again."""

    def __init__(self, sandbox: Sandbox, remote: RemoteHandlers) -> None:
        self._sandbox = sandbox
        self._remote = remote
        self._detach: Callable[[], None] = lambda: None

    def renew(self) -> None:
        """Attach to the current sandbox of the id. The latest client to attach comes first."""
        self.end()
        self._detach = self._sandbox.egress_proxy.handlers.attach(self._remote)

    def end(self) -> None:
        """Detach."""
        self._detach()


async def _run_forever() -> None:
    await asyncio.Event().wait()


async def _log_events(sandbox: Sandbox, cursor: int | None) -> AsyncGenerator[bytes, None]:
    audit_log = await sandbox.network.audit_log()
    async for entry in audit_log.follow(cursor):
        yield event("request", entry, str(entry.cursor))


def _change_hosts(changes: EgressChanges, body: ChangeEgress) -> EgressChanges:
    for change, hosts in (
        (EgressChanges.remove_allowed, body.remove_allowed),
        (EgressChanges.remove_denied, body.remove_denied),
        (EgressChanges.deny, body.deny),
        (EgressChanges.allow, body.allow),
    ):
        changes = functools.reduce(change, hosts, changes)
    return changes


async def _layers(sandbox: Sandbox) -> EgressLayers:
    row = await sandbox.lifecycle.row()
    if row is None:
        raise sandbox_not_found(sandbox.id)
    return row.egress


async def _info(sandbox: Sandbox) -> EgressInfo:
    layers = await _layers(sandbox)
    stored, policy = layers.to_json(), layers.egress()
    return EgressInfo(
        in_force={
            field.name: getattr(policy, field.name) for field in fields(policy) if field.init
        },
        settings=stored["settings"],
        changes=stored["changes"],
        served=sorted(sandbox.egress_proxy.handlers.slots),
    )


ENDPOINTS = [get, put, change, reset, log, follow_log]
SOCKETS = [handlers]
