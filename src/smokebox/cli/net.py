"""`smokebox net`: a sandbox's network log and egress policy."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Id  # noqa: TC001
from smokebox.cli.output import print_json
from smokebox.cli.remote import find_sandbox, run_with_client

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox
    from smokebox.types import NetworkEvent

_DEFAULT_PORTS = {"http": 80, "https": 443}


def net(
    id: Id,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
    policy: Annotated[
        bool, typer.Option("--policy", help="Print the egress policy as JSON.")
    ] = False,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Allow a host. Repeatable.")
    ] = None,
    deny: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Deny a host. Repeatable.")
    ] = None,
    internet: Annotated[
        bool | None, typer.Option("--internet/--no-internet", help="Allow or deny all other hosts.")
    ] = None,
) -> int:
    """Print the network log of a sandbox, or change its egress policy.

    Does not wake it. A host is a name, an address, or a glob such as '*.example.com'. Changes
    override the settings of the sandbox until they are changed again.
    """

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        changed = await _change(sandbox, allow or [], deny or [], internet)
        if policy:
            await _print_policy(sandbox)
        elif follow:
            await _follow(sandbox, as_json=as_json)
        elif not changed:
            await _print_log(sandbox, as_json=as_json)

    return run_with_client(work)


async def _change(
    sandbox: Sandbox, allow: list[str], deny: list[str], internet: bool | None
) -> bool:
    for host in deny:
        await sandbox.deny_host(host)
    for host in allow:
        await sandbox.allow_host(host)
    if internet is not None:
        await sandbox.set_internet(internet)
    return bool(allow or deny or internet is not None)


async def _print_policy(sandbox: Sandbox) -> None:
    policy = await sandbox.get_egress()
    print_json({one.name: getattr(policy, one.name) for one in fields(policy) if one.init})


async def _print_log(sandbox: Sandbox, *, as_json: bool) -> None:
    events: list[NetworkEvent] = []
    while more := await sandbox.network_log(after=events[-1].cursor if events else 0, limit=1000):
        events += more
    if as_json:
        print_json(events)
        return
    for event in events:
        typer.echo(format_event(event))


async def _follow(sandbox: Sandbox, *, as_json: bool) -> None:
    import msgspec

    async for event in sandbox.follow_network_log():
        typer.echo(msgspec.json.encode(event).decode() if as_json else format_event(event))


def format_event(event: NetworkEvent) -> str:
    """Format an event as one line: time, verdict, request and rule."""
    port = "" if event.port == _DEFAULT_PORTS.get(event.protocol) else f":{event.port}"
    host = f"[{event.host}]" if ":" in event.host else event.host
    request = f"{event.protocol}://{host}{port}{event.path or ''}"
    parts = [
        time.strftime("%H:%M:%S", time.localtime(event.at)),
        f"{event.verdict:<9}",
        *([event.method] if event.method else []),
        request,
        *([str(event.status)] if event.status is not None else []),
        f"{event.sent}/{event.received}",
        f"[{event.rule}]",
        *([f"by {event.handler}"] if event.handler else []),
        *([event.reason] if event.reason else []),
    ]
    line = " ".join(parts)
    # A sandbox chooses parts of the line: escape what could control the terminal.
    return line if line.isprintable() else ascii(line)[1:-1]
