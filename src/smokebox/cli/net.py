"""`smokebox net`: what a sandbox asked of the network, and what it may ask."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox
    from smokebox.types import NetworkEvent

_DEFAULT_PORTS = {"http": 80, "https": 443}


def net(
    id: Id,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is asked from here on.")
    ] = False,
    as_json: AsJson = False,
    policy: Annotated[
        bool, typer.Option("--policy", help="Print what it may reach, as JSON.")
    ] = False,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Open a host. Repeatable.")
    ] = None,
    deny: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Close a host. Repeatable.")
    ] = None,
    internet: Annotated[
        bool | None, typer.Option("--internet/--no-internet", help="Open or close the rest.")
    ] = None,
) -> int:
    """Print what a sandbox asked of the network, or change what it may ask.

    Does not wake it. A host is a name, an address, or a glob such as '*.example.com'. What
    is changed goes before the settings of the sandbox, until it is changed again.
    """
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        sandbox = await find(client, id)
        changed = await _change(sandbox, allow or [], deny or [], internet)
        if policy:
            await _print_policy(sandbox)
        elif follow:
            await _follow(sandbox, as_json=as_json)
        elif not changed:
            await _print_log(sandbox, as_json=as_json)

    return talk(work)


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
    from smokebox.cli.table import print_json
    from smokebox.egress.layers import SETTINGS

    policy = await sandbox.get_egress()
    print_json({name: getattr(policy, name) for name in (*SETTINGS, "opened_hosts")})


async def _print_log(sandbox: Sandbox, *, as_json: bool) -> None:
    from smokebox.cli.table import print_json

    events: list[NetworkEvent] = []
    while more := await sandbox.network_log(after=events[-1].cursor if events else 0, limit=1000):
        events += more
    if as_json:
        print_json(events)
        return
    for event in events:
        typer.echo(line_of(event))


async def _follow(sandbox: Sandbox, *, as_json: bool) -> None:
    import msgspec

    async for event in sandbox.follow_network_log():
        typer.echo(msgspec.json.encode(event).decode() if as_json else line_of(event))


def line_of(event: NetworkEvent) -> str:
    """An event as one line: when, what became of it, what was asked, by which rule."""
    port = "" if event.port == _DEFAULT_PORTS.get(event.protocol) else f":{event.port}"
    host = f"[{event.host}]" if ":" in event.host else event.host
    asked = f"{event.protocol}://{host}{port}{event.path or ''}"
    parts = [
        time.strftime("%H:%M:%S", time.localtime(event.at)),
        f"{event.verdict:<9}",
        *([event.method] if event.method else []),
        asked,
        *([str(event.status)] if event.status is not None else []),
        f"{event.sent}/{event.received}",
        f"[{event.rule}]",
        *([f"by {event.handler}"] if event.handler else []),
        *([event.reason] if event.reason else []),
    ]
    line = " ".join(parts)
    # A sandbox chose some of it, and a terminal would do what it says.
    return line if line.isprintable() else ascii(line)[1:-1]
