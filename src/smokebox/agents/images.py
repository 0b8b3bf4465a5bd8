"""Images of a prompt: checked, and stored as blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from smokebox.agents.messages import ImagePart
from smokebox.agents.tools.output import MAX_IMAGE_BYTES, image_type
from smokebox.agents.workspace import no_workspace
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.agents.log.store import SessionStore
    from smokebox.sandbox.api import SandboxApi


ImageSource: TypeAlias = bytes | str | Path
"""Bytes of an image, its path in the workspace as a str, or its `Path` on the host."""


def check_images(images: object) -> tuple[ImageSource, ...]:
    """Return the images of a prompt. Raises `InvalidOption` for other values."""
    if isinstance(images, (str, bytes, Path)) or not isinstance(images, Sequence):
        raise InvalidOption(
            "images is a list.", hint="Write images=[...].", option="images", value=type(images)
        )
    for image in images:
        if isinstance(image, bytes):
            media_type(image, "an image")
        elif not isinstance(image, (str, Path)):
            raise InvalidOption(
                f"{image!r:.80} is not an image.",
                hint="Pass bytes, a path in the workspace, or a pathlib.Path on this host.",
                option="images",
            )
    return tuple(images)


async def store_images(
    images: Sequence[ImageSource], store: SessionStore, workspace: SandboxApi | None
) -> list[ImagePart]:
    """Store the images of a prompt as blobs."""
    parts = []
    for image in images:
        data = await _load(image, workspace)
        name = image if isinstance(image, str) else "an image"
        parts.append(ImagePart(media_type(data, name), await store.put_blob(data), len(data)))
    return parts


def media_type(data: bytes, name: str) -> str:
    """Return the media type of an image. Raises `InvalidOption` for one that no model accepts."""
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidOption(
            f"images: {name} has {len(data)} bytes, more than the {MAX_IMAGE_BYTES} that models "
            "accept.",
            hint="Scale it down first.",
            option="images",
            size=len(data),
            limit=MAX_IMAGE_BYTES,
        )
    found = image_type(data)
    if found is None:
        raise InvalidOption(
            f"images: {name} is not in a format that models accept.",
            hint="Convert it to PNG, JPEG, GIF or WebP.",
            option="images",
        )
    return found


async def _load(image: ImageSource, workspace: SandboxApi | None) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return await asyncio.to_thread(image.read_bytes)
    if workspace is None:
        raise no_workspace("images")
    return await workspace.read_bytes(image)
