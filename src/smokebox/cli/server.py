"""Commands on the server: serve, up, down, status."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson  # noqa: TC001
from smokebox.cli.output import format_span, format_value, notice, print_fields, print_json
from smokebox.cli.remote import run_with_client
from smokebox.isolation import DEFAULT_TIER, Tier

if TYPE_CHECKING:
    from smokebox.client.client import Client

PORT = 8700
NOT_RUNNING = 3


def serve(
    home: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="State directory; SMOKEBOX_HOME by default."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on, 0 for any.")
    ] = PORT,
    no_tcp: Annotated[
        bool, typer.Option("--no-tcp", help="Listen only on the unix socket of the directory.")
    ] = False,
    keys: Annotated[
        bool | None,
        typer.Option(
            "--keys/--no-keys",
            help="Require API keys; by default only if other machines can connect.",
            show_default=False,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Accept this Host header. Repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Accept requests from pages of this site. Repeatable."),
    ] = None,
    preview_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Base URL of previews, besides localhost."),
    ] = None,
    preview_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.001, help="Longest silence of a program behind a preview."
        ),
    ] = 300.0,
    head_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.001, help="Longest time for the head of a request."),
    ] = 10.0,
    address_connections: Annotated[
        int, typer.Option(min=1, help="Open TCP connections for each address.")
    ] = 256,
    max_connections: Annotated[
        int | None,
        typer.Option(min=1, help="Open TCP connections in all; else half of the open files."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Take addresses from this proxy's X-Forwarded-For. Repeatable."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second for each key.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests for each key.")
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="Exit after this time without requests or running sandboxes.",
        ),
    ] = None,
    tier: Annotated[Tier, typer.Option(help="Default isolation tier.")] = DEFAULT_TIER,
    pool: Annotated[
        int | None, typer.Option(min=0, help="Number of sandboxes to create ahead of need.")
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Offer the buckets of the smokebox.toml in this folder."),
    ] = None,
    backups: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="SMOKEBOX_BACKUPS",
            show_envvar=False,
            help="Bucket for backups, such as s3://name/folder; else the state directory.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Images, networks, handlers, profiles; else DIR/server.toml."
        ),
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON lines.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Run a demonstration and print what to try next.")
    ] = False,
) -> int:
    """Run a server in the foreground until Ctrl-C.

    Listens on the unix socket of its state directory and on http://127.0.0.1:8700. Sandboxes
    outlive the server: the next one on the same directory takes them over.
    """
    from smokebox.cli.foreground import offered_buckets, run
    from smokebox.engine.host import POOL_SIZE
    from smokebox.foundation.endpoint import default_home
    from smokebox.server.config import load_server_config
    from smokebox.server.settings import ServerSettings

    state = os.path.abspath(os.path.expanduser(home)) if home else default_home()
    granted = load_server_config(state, config)
    settings = ServerSettings(
        home=state,
        host=None if no_tcp else host,
        port=port,
        keys=keys,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        preview_url=preview_url,
        preview_timeout=preview_timeout,
        head_timeout=head_timeout,
        address_connections=address_connections,
        max_connections=max_connections,
        trusted_proxies=tuple(trusted_proxy or ()),
        rate=rate,
        concurrency=concurrency,
        idle_exit=idle_exit,
        tier=tier,
        pool=POOL_SIZE if pool is None else pool,
        buckets=offered_buckets(buckets) if buckets else {},
        directories=granted.directories,
        private_networks=granted.private_networks,
        storage_pool=granted.storage_pool,
        handlers=granted.handlers,
        profiles=granted.profiles,
        registries=granted.registries,
        backups=backups,
        log_json=log_json,
    )
    run(settings, show=show or sys.stdout.isatty())
    return 0


def up() -> int:
    """Start a server in the background and print its socket.

    It runs until `smokebox down`. Commands that need a server start one too, which exits when
    it has been idle for a while.
    """
    from smokebox.client.background import find, start

    if find() is None:
        notice("Starting a server in the background ...")
    typer.echo(start(idle_exit=None).socket)
    return 0


def down(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave sandboxes running for the next server.")
    ] = False,
) -> int:
    """Stop the background server. Its sandboxes sleep and keep their files."""
    from smokebox.client.background import stop

    notice("Stopping the server ...")
    if not stop(keep=keep):
        typer.echo("No server is running.", err=True)
    return 0


def status(as_json: AsJson = False) -> int:
    """Show the server that commands talk to.

    Exits with 0 if it is running, with 3 otherwise.
    """
    url = os.environ.get("SMOKEBOX_URL")
    server = _background_server() if not url else {"url": url}
    if server is None:
        if as_json:
            print_json({"running": False})
        else:
            typer.echo("No server is running. `smokebox up` starts one.", err=True)
        return NOT_RUNNING

    async def work(client: Client) -> None:
        facts = {**server, **await _count(client)}
        if as_json:
            print_json({"running": True, **facts})
        else:
            uptime = facts.get("uptime")
            if isinstance(uptime, float):
                facts["uptime"] = format_span(uptime)
            print_fields((name, format_value(value)) for name, value in facts.items())

    return run_with_client(work)


def _background_server() -> dict[str, object] | None:
    from smokebox.client.background import find

    server = find()
    if server is None:
        return None
    return {
        "socket": server.socket,
        "log": server.log,
        "pid": server.pid,
        "uptime": server.uptime,
        "draining": server.draining,
    }


async def _count(client: Client) -> dict[str, object]:
    version, sandboxes = (await client.health()).version, await client.list()
    active = sum(one.status == "active" for one in sandboxes)
    return {"version": version, "sandboxes": len(sandboxes), "active": active}
