"""`smokebox images`: list, build, pull, load, push, inspect, remove and prune images."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.image_build import build
from smokebox.cli.options import AsJson, parse_duration, subcommands
from smokebox.cli.output import (
    format_age,
    format_size,
    notice,
    print_fields,
    print_json,
    print_table,
)
from smokebox.cli.remote import run_with_client
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smokebox.client.client import Client
    from smokebox.types import ImageInfo, LayerProgress

images = subcommands("Build images, pull or load them, and manage those of the server.")
images.command("build")(build)

Name = Annotated[str, typer.Argument(metavar="IMAGE", help="Reference, or digest of an image.")]
Username = Annotated[
    str | None, typer.Option("--username", "-u", metavar="NAME", help="User of the registry.")
]
PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from standard input.")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", "-t", metavar="SECONDS", min=0.001, help="Cancel after this time."),
]

_DIGEST = 19
_LONGEST_PASSWORD = 64 * 1024


@images.command("ls")
def list_all(as_json: AsJson = False) -> int:
    """List the images that sandboxes can start from, oldest first."""

    async def work(client: Client) -> None:
        found = await client.images.list()
        if as_json:
            print_json(found)
            return
        print_table(
            ("IMAGE", "DIGEST", "LAYERS", "SIZE", "CREATED", "USED"),
            [
                (
                    _title(one),
                    one.digest[:_DIGEST],
                    str(one.layers),
                    format_size(one.size),
                    format_age(one.created_at),
                    format_age(one.used_at) if one.used_at else "never",
                )
                for one in found
            ],
        )

    return run_with_client(work)


@images.command()
def pull(
    names: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="References: python:3.12-slim.")
    ],
    missing: Annotated[
        bool, typer.Option("--missing", help="Do not ask the registry about known images.")
    ] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Let every key of the server use them.")
    ] = False,
    username: Username = None,
    password_stdin: PasswordStdin = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> int:
    """Pull images from registries.

    Credentials are those of `docker login`, unless you pass some. They are not stored.
    """
    password = _password(username, password_stdin)

    async def work(client: Client) -> None:
        results = []
        for name in names:
            with layer_bars(name) as update:
                result = await client.images.pull(
                    name,
                    policy="missing" if missing else "always",
                    username=username,
                    password=password,
                    share=share,
                    timeout=timeout,
                    progress=update,
                )
            results.append(result)
            if result.note:
                typer.secho(result.note, err=True)
            if not as_json:
                state = "pulled" if result.pulled else "up to date"
                typer.echo(f"{result.reference}  {format_size(result.image.size)}  {state}")
        if as_json:
            print_json(results)

    return run_with_client(work)


@images.command()
def load(
    image: Annotated[
        str,
        typer.Argument(
            metavar="oci:DIR|archive:FILE", help="OCI layout, or archive of `docker save`."
        ),
    ],
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", "-t", metavar="NAME", help="Name of the image. Repeatable."),
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Let every key of the server use it.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Load an image from local files, and print its digest.

    Only layers that the server lacks are uploaded. Write :NAME behind the path for one of several
    images.
    """

    async def work(client: Client) -> None:
        with layer_bars(image) as update:
            loaded = await client.images.load(image, names=tag, share=share, progress=update)
        if as_json:
            print_json(loaded)
        else:
            typer.echo(loaded.digest)

    return run_with_client(work)


@images.command()
def push(
    name: Name,
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="Reference; by default its name.")
    ] = None,
    username: Username = None,
    password_stdin: PasswordStdin = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> int:
    """Push an image to a registry, and print its reference with the digest."""
    password = _password(username, password_stdin)

    async def work(client: Client) -> None:
        with layer_bars(target or name) as update:
            result = await client.images.push(
                name,
                target,
                username=username,
                password=password,
                timeout=timeout,
                progress=update,
            )
        if as_json:
            print_json(result)
        else:
            typer.echo(f"{result.reference}@{result.digest}")

    return run_with_client(work)


@images.command()
def inspect(name: Name, as_json: AsJson = False) -> int:
    """Show an image and its configuration."""

    async def work(client: Client) -> None:
        found = await client.images.inspect(name)
        if as_json:
            print_json(found)
            return
        facts = [
            ("digest", found.digest),
            *(("name", one) for one in found.names),
            ("source", found.source),
            ("layers", str(found.layers)),
            ("size", format_size(found.size)),
            ("created", format_age(found.created_at)),
            ("used", format_age(found.used_at) if found.used_at else "never"),
        ]
        config = found.config.get("config") or {}
        facts += [(key.lower(), _shown(value)) for key, value in sorted(config.items()) if value]
        print_fields((name, _printable(value)) for name, value in facts)

    return run_with_client(work)


@images.command()
def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="References, or digests of images.")
    ],
) -> int:
    """Remove images. Sandboxes that run keep theirs."""

    async def work(client: Client) -> None:
        for name in names:
            await client.images.remove(name)

    return run_with_client(work)


@images.command()
def prune(
    unused_for: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep images used within this time: 7d.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Remove images without a name that nothing needs, and their layers."""
    seconds = 0.0 if unused_for is None else parse_duration("--unused-for", unused_for)

    async def work(client: Client) -> None:
        removed = await client.images.prune(unused_for=seconds)
        if as_json:
            print_json(removed)
        else:
            typer.echo(f"Removed {removed.layers} layers, {format_size(removed.bytes)}.")

    return run_with_client(work)


@contextlib.contextmanager
def layer_bars(name: str) -> Iterator[Callable[[LayerProgress], None] | None]:
    """Show a bar for each layer on stderr; yields the update function, None without a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    # Slow to import, and not needed for the other commands.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

    columns = (
        TextColumn("{task.fields[layer]}"),
        TextColumn("{task.fields[state]:<11}"),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
    )
    tasks: dict[str, TaskID] = {}
    notice(f"{_printable(name)} ...")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def update(layer: LayerProgress) -> None:
            short = layer.digest.removeprefix("sha256:")[:12]
            if layer.digest not in tasks:
                tasks[layer.digest] = bars.add_task("", total=layer.total, layer=short, state="")
            bars.update(
                tasks[layer.digest], completed=layer.done, total=layer.total, state=layer.state
            )

        yield update


def _password(username: str | None, from_stdin: bool) -> str | None:
    if (username is None) == from_stdin:
        raise InvalidOption(
            "--username and --password-stdin go together.",
            hint="Write `... --username NAME --password-stdin < FILE`, or use `docker login`.",
            option="--username",
            value=username,
        )
    return sys.stdin.read(_LONGEST_PASSWORD).strip("\r\n") if from_stdin else None


def _title(image: ImageInfo) -> str:
    """Return the name with a tag, if there is one."""
    names = sorted(image.names, key=lambda name: ("@" in name, name))
    return _printable(names[0]) if names else "-"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(sorted(map(str, value)))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _printable(text: str) -> str:
    # An image chooses its texts: escape what could control the terminal.
    return text if text.isprintable() else ascii(text)[1:-1]
