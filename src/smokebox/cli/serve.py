"""`smokebox serve`: the server of a state directory, in the foreground until it is stopped."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

PORT = 8700


def serve(
    home: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The state directory; else SMOKEBOX_HOME."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on, 0 for any.")
    ] = PORT,
    no_tcp: Annotated[
        bool, typer.Option("--no-tcp", help="Listen on the unix socket of the directory only.")
    ] = False,
    keys: Annotated[
        bool | None,
        typer.Option(
            "--keys/--no-keys",
            help="Ask for API keys; else only where other machines can ask.",
            show_default=False,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that it may be asked by. Repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A site whose pages may ask. Repeatable."),
    ] = None,
    preview_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Below which name previews are, besides localhost."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second, for each key.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time, for each key.")
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.001, help="End when idle for so long, with none that runs."
        ),
    ] = None,
    tier: Annotated[
        Literal["namespaces", "gvisor"], typer.Option(help="What isolates by default.")
    ] = "namespaces",
    pool: Annotated[
        int | None, typer.Option(min=0, help="How many sandboxes to make ahead.")
    ] = None,
    git_private: Annotated[
        bool, typer.Option("--git-private", help="Clone also from addresses of this network.")
    ] = False,
    buckets: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the smokebox.toml is whose buckets it offers."),
    ] = None,
    bucket_private: Annotated[
        bool, typer.Option("--bucket-private", help="Mount also from addresses of this network.")
    ] = False,
    backups: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="SMOKEBOX_BACKUPS",
            show_envvar=False,
            help="The bucket for backups, such as s3://name/folder; else the directory.",
        ),
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines of JSON.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Try it first, and say what to try next.")
    ] = False,
) -> int:
    """Run the server here until Ctrl-C.

    It listens on the unix socket of its state directory and on http://127.0.0.1:8700.
    Sandboxes outlive it: the next server of the directory has them again.
    """
    from smokebox.cli.foreground import run
    from smokebox.cli.offering import offered
    from smokebox.engine.host import POOL_SIZE
    from smokebox.server.settings import Settings
    from smokebox.wire.place import default_home

    settings = Settings(
        home=os.path.abspath(os.path.expanduser(home)) if home else default_home(),
        host=None if no_tcp else host,
        port=port,
        keys=keys,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        preview_url=preview_url,
        rate=rate,
        concurrency=concurrency,
        idle_exit=idle_exit,
        tier=tier,
        pool=POOL_SIZE if pool is None else pool,
        git_private=git_private,
        buckets=offered(buckets) if buckets else {},
        bucket_private=bucket_private,
        backups=backups,
        log_json=log_json,
    )
    run(settings, show=show or sys.stdout.isatty())
    return 0
