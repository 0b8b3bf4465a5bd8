"""What a sandbox may reach: its policy, changes at run time, handlers of clients, the log."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from smokebox.egress.handler import CLIENT
from smokebox.egress.importing import find_handler
from smokebox.egress.layers import CATCH_ALL, SETTINGS, Changes, check_opened
from smokebox.egress.policy import Egress as Policy
from smokebox.egress.policy import handler_key
from smokebox.egress.remote import Remote
from smokebox.errors import Forbidden, InvalidOption, LimitReached, SandboxGone
from smokebox.server.call import Call, missing
from smokebox.server.endpoint import endpoint
from smokebox.server.events import EventResponse, event
from smokebox.server.sockets import Channel, socket
from smokebox.wire import sse
from smokebox.wire.answers import EgressInfo, EgressInForce, NetworkEvents
from smokebox.wire.handlers import ServeFrame, from_client
from smokebox.wire.requests import ChangeEgress, Egress, FollowNetworkLog, NetworkLog

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from smokebox.egress.layers import Layers
    from smokebox.engine import Sandbox
    from smokebox.server.principal import Principal

_CHANGING = (InvalidOption, LimitReached, SandboxGone)


@endpoint("GET", "/sandboxes/{id}/egress")
async def get(call: Call) -> EgressInfo:
    """What a sandbox may reach, and by which handlers. Does not wake it."""
    return await _info(call.sandbox)


@endpoint("PUT", "/sandboxes/{id}/egress", errors=_CHANGING, slow=True)
async def put(call: Call, body: Egress) -> EgressInfo:
    """Replace the settings; those that are left out have their defaults.

    Changes that were made at run time stay, and go before them. To set some and leave the
    others, PUT the sandbox itself.
    """
    given = await egress_of(call.principal, body)
    await call.sandbox.network.configure({**dict.fromkeys(SETTINGS), **given})
    return await _info(call.sandbox)


@endpoint("POST", "/sandboxes/{id}/egress/changes", errors=_CHANGING, slow=True)
async def change(call: Call, body: ChangeEgress) -> EgressInfo:
    """Change what a sandbox may reach, from its next request on.

    Changes outlive its sleep and the server, and settings that are sent again.
    """
    handlers = {handler_key(name): one for name, one in body.outbound_by_host.items()}
    if body.outbound is not UNSET:
        handlers[CATCH_ALL] = body.outbound
    await check_handlers(call.principal, handlers.values())

    def changed(changes: Changes) -> Changes:
        changes = _hosts(changes, body)
        for slot, handler in handlers.items():
            changes = changes.set_handler(slot, handler)
        return changes if body.internet is UNSET else changes.set_internet(body.internet)

    layers = await _layers(call.sandbox)
    for host in body.allow:
        # One that a glob keeps closed says so, and nothing is changed.
        check_opened(_with(layers, changed).egress(), host)
    await call.sandbox.network.change(changed)
    return await _info(call.sandbox)


@endpoint("DELETE", "/sandboxes/{id}/egress/changes", errors=_CHANGING, slow=True)
async def reset(call: Call) -> EgressInfo:
    """Forget the changes: the settings hold again."""
    await call.sandbox.network.change(lambda _: Changes())
    return await _info(call.sandbox)


@endpoint("GET", "/sandboxes/{id}/egress/log")
async def log(call: Call, query: NetworkLog) -> NetworkEvents:
    """What a sandbox asked of the network, and what became of it. Does not wake it."""
    journal = await call.sandbox.network.journal()
    return NetworkEvents(await journal.read(query.after, query.limit))


@endpoint("GET", "/sandboxes/{id}/egress/log/stream", gives=sse.MEDIA)
async def follow_log(call: Call, query: FollowNetworkLog) -> EventResponse:
    """Give what a sandbox asks of the network, as it ends.

    Events: `request` for each, whose id is the cursor after it. The header Last-Event-ID
    goes before `cursor`. Does not wake the sandbox, nor keep it awake.
    """
    last = call.request.headers.get("last-event-id", "")
    cursor = int(last) if last.isascii() and last.isdigit() else query.cursor
    return EventResponse(call, _log_events(call.sandbox, cursor))


@socket("/sandboxes/{id}/egress/handlers")
async def handlers(call: Call, channel: Channel) -> None:
    """Run the handlers of a client, for as long as this socket is open.

    The client says by `serve` which entries it has handlers for; of several clients the
    latest is asked. For each request the server sends `handle`, and the client answers with
    `send`, `respond`, `refuse` or `fail`. Bodies are binary frames, and sent as far as
    `pull` asks for them.
    """
    await channel.accept()
    remote = Remote(channel.send)
    attached = _Attached(call.sandbox, remote)

    async def hear(frame: bytes | str) -> None:
        try:
            heard = from_client(frame)
        except ValueError as error:
            raise InvalidOption(
                f"that frame makes no sense here: {error}.",
                hint="See smokebox.wire.handlers.",
                option="frame",
            ) from error
        if isinstance(heard, ServeFrame):
            attached.renew()
        await remote.hear(heard)

    try:
        with call.state.drain.lasting():
            await channel.converse(_forever(), hear)
    finally:
        attached.end()
        await remote.aclose()


async def egress_of(principal: Principal, body: Egress) -> dict[str, Any]:
    """The settings of the network that a body has. Raises `Forbidden` for what is not for
    whoever asks."""
    fields = {name: getattr(body, name) for name in SETTINGS}
    given = {name: value for name, value in fields.items() if value is not UNSET}
    await check_handlers(
        principal, [given.get("outbound"), *(given.get("outbound_by_host") or {}).values()]
    )
    return given


async def check_handlers(principal: Principal, handlers: Iterable[str | None]) -> None:
    """See that handlers of the server are there, and asked for by who may have it run them."""
    for handler in {one for one in handlers if one is not None and one != CLIENT}:
        if not principal.admin:
            raise Forbidden(
                f"the handler {handler!r} would run in the server, which is for administrators.",
                hint="Define it in your own program, or use a key of an administrator.",
                key=principal.id,
                reason="admin",
            )
        # A module of a user's may take its time.
        await asyncio.to_thread(find_handler, handler)


class _Attached:
    """A client among those that serve a sandbox, also of the next of its id."""

    def __init__(self, sandbox: Sandbox, remote: Remote) -> None:
        self._sandbox = sandbox
        self._remote = remote
        self._detach: Callable[[], None] = lambda: None

    def renew(self) -> None:
        """Serve the sandbox that there is; the latest to say so is asked first."""
        self.end()
        self._detach = self._sandbox.door.clients.attach(self._remote)

    def end(self) -> None:
        """Serve no more."""
        self._detach()


async def _forever() -> None:
    await asyncio.Event().wait()


async def _log_events(sandbox: Sandbox, cursor: int | None) -> AsyncGenerator[bytes, None]:
    journal = await sandbox.network.journal()
    async for one in journal.follow(cursor):
        yield event("request", one, str(one.cursor))


def _hosts(changes: Changes, body: ChangeEgress) -> Changes:
    for one, hosts in (
        (Changes.remove_allowed, body.remove_allowed),
        (Changes.remove_denied, body.remove_denied),
        (Changes.deny, body.deny),
        (Changes.allow, body.allow),
    ):
        changes = functools.reduce(one, hosts, changes)
    return changes


def _with(layers: Layers, change: Callable[[Changes], Changes]) -> Layers:
    return type(layers)(settings=layers.settings, changes=change(layers.changes))


async def _layers(sandbox: Sandbox) -> Layers:
    row = await sandbox.life.row()
    if row is None:
        raise missing(sandbox.id)
    return row.egress


async def _info(sandbox: Sandbox) -> EgressInfo:
    layers = await _layers(sandbox)
    told = layers.to_json()
    return EgressInfo(
        in_force=_in_force(layers.egress()),
        settings=told["settings"],
        changes=told["changes"],
        served=sorted(sandbox.door.clients.slots),
    )


def _in_force(policy: Policy) -> EgressInForce:
    return EgressInForce(
        **{name: getattr(policy, name) for name in EgressInForce.__struct_fields__}
    )


ENDPOINTS = [get, put, change, reset, log, follow_log]
SOCKETS = [handlers]
