"""`smokebox images build`: build an image from a Dockerfile, with live output."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smokebox.cli.image_progress import ProgressPrinter
from smokebox.cli.options import Egress, parse_egress_words, parse_limits, parse_pairs
from smokebox.cli.remote import run_with_client
from smokebox.errors import BuildFailed, InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.client.settings import SandboxSettings


def build(
    path: Annotated[
        str,
        typer.Argument(metavar="[PATH]", help="Directory of the build context, or recipe:NAME."),
    ] = ".",
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE", help="Dockerfile.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", "-t", metavar="NAME", help="Name of the image. Repeatable."),
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Value of an ARG. Repeatable."),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="STAGE", help="Stage to build.")] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="OS/ARCH", help="Platform; only the host's is possible.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="id=ID,src=FILE|env=NAME", help="Secret for RUN. Repeatable."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every step again.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep a sandbox with the files of a step that fails.")
    ] = False,
    mirrors: Annotated[
        bool, typer.Option("--mirrors", help="Use the host's package mirrors in RUN.")
    ] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Let every key of the server use the image.")
    ] = False,
    egress: Egress = None,
    limits: Annotated[
        str | None, typer.Option(metavar="LIMITS", help="Limits of each step: memory=2GiB.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="Cancel after this time.")
    ] = None,
    progress: Annotated[
        Literal["plain", "quiet", "json"], typer.Option(help="What to print.")
    ] = "plain",
) -> int:
    """Build an image from a Dockerfile or a recipe, and print its digest.

    Steps run in sandboxes without a network; --egress opens hosts to them. Finished steps are
    cached.
    """
    secrets = dict(_secret(text) for text in secret or ())
    arguments = _build_args(build_arg)

    async def work(client: Client) -> None:
        with ProgressPrinter(progress) as printer:
            try:
                digest = await client.builds.build(
                    path,
                    file=file,
                    on_event=printer.show,
                    names=tag or (),
                    build_args=arguments,
                    target=target,
                    platform=platform,
                    secrets=secrets,
                    no_cache=no_cache,
                    keep=keep,
                    mirrors=mirrors,
                    share=share,
                    egress=parse_egress_words(egress),
                    limits=parse_limits(limits),
                    timeout=timeout,
                )
            except BuildFailed as error:
                printer.show_failure(error)
                raise
        if progress != "json":
            typer.echo(digest)

    return run_with_client(work)


async def prepare_image(client: Client, settings: SandboxSettings) -> None:
    """Build the image of a sandbox with progress, if it is a recipe."""
    from smokebox.client.image_builds import is_recipe

    image = settings.get("image")
    if is_recipe(image):
        with ProgressPrinter("plain") as printer:
            await client.builds.build(image, on_event=printer.show)


def _build_args(texts: list[str] | None) -> dict[str, str]:
    """Parse NAME=VALUE; a name alone has the value of the environment."""
    found = {}
    for text in texts or ():
        if "=" in text:
            found.update(parse_pairs("--build-arg", [text]) or {})
        elif text in os.environ:
            found[text] = os.environ[text]
    return found


def _secret(text: str) -> tuple[str, bytes]:
    """Parse `id=ID,src=FILE` or `id=ID,env=NAME`."""
    fields = dict(word.partition("=")[::2] for word in text.split(","))
    id = fields.get("id", "")
    path, name = fields.get("src") or fields.get("source"), fields.get("env")
    try:
        if not id or fields.keys() - {"id", "src", "source", "env", "type"}:
            raise ValueError("it needs an id, and src or env")
        if path:
            with open(os.path.expanduser(path), "rb") as file:
                return id, file.read()
        return id, os.environ[name or id].encode(errors="surrogateescape")
    except (OSError, KeyError, ValueError) as error:
        problem = f"the variable {error} is not set" if isinstance(error, KeyError) else str(error)
        raise InvalidOption(
            f"--secret {text}: {problem}.",
            hint="Pass id=NAME,src=FILE or id=NAME,env=VARIABLE.",
            option="--secret",
            value=text,
        ) from None
