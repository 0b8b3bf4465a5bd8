"""Images of a project's bindings, built while the development server runs."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import typer

from smokebox.cli.image_progress import ProgressPrinter
from smokebox.cli.output import report
from smokebox.cli.project.development import SCAN_SECONDS, scan
from smokebox.client.bindings import Binding, sandbox_bindings
from smokebox.client.client import default_client
from smokebox.client.image import is_local
from smokebox.client.image_builds import BuildOptions, is_recipe
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
        for image, (binding, state) in images.items():
            if built.get(image) != state:
                built[image] = state
                await _build(binding)
        await asyncio.sleep(SCAN_SECONDS)


def _images(root: Path) -> dict[str, tuple[Binding, object]]:
    """Return the images to build, each with a binding and what it is built from."""
    try:
        bindings = sandbox_bindings(load_config(root))
    except SmokeboxError:
        # Reported when the project is reloaded.
        return {}
    found: dict[str, tuple[Binding, object]] = {}
    for binding in bindings.values():
        settings = binding.settings
        image = settings.image
        if isinstance(image, str) and is_recipe(image):
            found[image] = binding, "recipe"
        elif isinstance(image, str) and is_local(image):
            folder = image if os.path.isdir(image) else os.path.dirname(image)
            found[image] = binding, (scan(folder, suffixes=""), settings.egress, settings.mirrors)
    return found


async def _build(binding: Binding) -> None:
    """Build the image of a binding as its first sandbox would."""
    typer.secho(f"building the image of {binding.name}", fg="blue", err=True)
    settings = binding.settings
    options: BuildOptions = {}
    if not is_recipe(settings.image):
        options = {"egress": settings.egress, "mirrors": bool(settings.mirrors)}
    image = settings.image or ""
    try:
        with ProgressPrinter("plain") as printer:
            await default_client().builds.build(image, on_event=printer.show, **options)
    except SmokeboxError as error:
        report(error)
