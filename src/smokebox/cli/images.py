"""`smokebox images`: build images."""

from __future__ import annotations

from smokebox.cli.image_build import build
from smokebox.cli.options import subcommands

images = subcommands("Build and manage images of sandboxes.")
images.command("build")(build)
