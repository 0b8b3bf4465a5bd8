"""`smokebox images build`: build an image from a Dockerfile, with live output."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smokebox.cli.options import Egress, parse_egress_words, parse_limits, parse_pairs
from smokebox.cli.remote import run_with_client
from smokebox.errors import BuildFailed, InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.client.settings import SandboxSettings
    from smokebox.wire.builds import BuildEvent


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
        printer = ProgressPrinter(progress)
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


async def prepare_image(client: Client, settings: SandboxSettings) -> SandboxSettings:
    """Build the image of a sandbox with progress, if it is one of files here or a recipe."""
    from smokebox.client.image import is_local
    from smokebox.client.image_builds import is_recipe

    image = settings.get("image")
    if not isinstance(image, str) or not (is_local(image) or is_recipe(image)):
        return settings
    printer = ProgressPrinter("plain")
    try:
        digest = await client.builds.build(image, on_event=printer.show)
    except BuildFailed as error:
        printer.show_failure(error)
        raise
    return settings if is_recipe(image) else {**settings, "image": digest}


class ProgressPrinter:
    """Prints the events of a build to standard error, and with "json" to standard output."""

    def __init__(self, style: str) -> None:
        self._style = style
        self._at_line_start = True
        self._current = 0

    def show(self, event: BuildEvent) -> None:
        """Print one event."""
        if self._style == "json":
            import msgspec

            typer.echo(msgspec.json.encode(event))
        elif self._style == "plain":
            self._show_plain(event)

    def show_failure(self, error: BuildFailed) -> None:
        """Print the end of the output where it was not printed before."""
        output = str(error.fields.get("output") or "")
        if self._style != "plain" and output:
            sys.stderr.write(output if output.endswith("\n") else output + "\n")

    def _show_plain(self, event: BuildEvent) -> None:
        label = f"[{event.step}/{event.steps}] "
        match event.kind:
            case "step":
                self._line(f"{label if event.step else ''}{_shorten(event.instruction)}")
            case "output":
                self._output(event)
            case "done" if event.cached and event.seconds < 0.5:
                self._line(f"{label}CACHED" if event.step else "")
            case "done":
                self._line(f"{label}DONE {event.seconds:.1f} s")
            case "warning":
                self._line(f"warning: {event.data}")
            case "image" if not event.steps:
                # A recipe that is known.
                pass
            case _:
                self._line(f"built in {event.seconds:.1f} s")

    def _output(self, event: BuildEvent) -> None:
        if self._current != event.step:
            self._line("")
        self._current = event.step
        prefix = f"[{event.step}/{event.steps}]   "
        for line in event.data.splitlines(keepends=True):
            sys.stderr.write(prefix + line if self._at_line_start else line)
            self._at_line_start = line.endswith("\n")
        sys.stderr.flush()

    def _line(self, text: str) -> None:
        if not self._at_line_start:
            sys.stderr.write("\n")
            self._at_line_start = True
        if text:
            typer.echo(text, err=True)


def _shorten(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= 100 else first[:99] + "…"


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
