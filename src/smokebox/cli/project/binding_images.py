"""Images of a project's bindings, built while the development server runs."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import typer

from smokebox.cli.image_progress import ProgressPrinter
from smokebox.cli.output import report
from smokebox.cli.project.development import SCAN_SECONDS, scan
from smokebox.client.bindings import sandbox_bindings
from smokebox.client.client import default_client
from smokebox.client.image import is_local
from smokebox.client.image_builds import is_recipe
from smokebox.errors import SmokeboxError
from smokebox.project import load_config

if TYPE_CHECKING:
    from pathlib import Path


async def build_images(root: Path) -> None:
    """Build the images of a project's bindings, and again what changes, until cancelled.

    A failure is reported, and the image is tried again after the next change.
    """
    built: dict[str, object] = {}
    while True:
        images = await asyncio.to_thread(_images, root)
        for image, (name, state) in images.items():
            if built.get(image) != state:
                built[image] = state
                await _build(name, image)
        await asyncio.sleep(SCAN_SECONDS)


def _images(root: Path) -> dict[str, tuple[str, object]]:
    """Return the images to build, each with a binding and the state of its files."""
    try:
        bindings = sandbox_bindings(load_config(root))
    except SmokeboxError:
        # Reported when the project is reloaded.
        return {}
    found: dict[str, tuple[str, object]] = {}
    for name, binding in bindings.items():
        image = binding.settings.image
        if isinstance(image, str) and is_recipe(image):
            found[image] = name, "recipe"
        elif isinstance(image, str) and is_local(image):
            folder = image if os.path.isdir(image) else os.path.dirname(image)
            found[image] = name, scan(folder, suffixes="")
    return found


async def _build(name: str, image: str) -> None:
    typer.secho(f"building the image of {name}", fg="blue", err=True)
    try:
        await default_client().builds.build(image, on_event=ProgressPrinter("plain").show)
    except SmokeboxError as error:
        report(error)
