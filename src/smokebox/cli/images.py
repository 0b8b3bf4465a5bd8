"""`smokebox images`: build images."""

from __future__ import annotations

from smokebox.cli.image_build import build
from smokebox.cli.options import subcommands

images = subcommands("Build images of sandboxes.")
images.command("build")(build)


@images.callback()
def group() -> None:
    """Build images of sandboxes."""
    # With a single command and no callback, typer would make that command the group.
