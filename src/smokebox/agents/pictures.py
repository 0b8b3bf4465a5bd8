"""The images of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from smokebox.agents.messages import Image
from smokebox.agents.sandboxes import no_workspace
from smokebox.agents.tools.images import MAX_IMAGE_BYTES, image_type
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.agents.log.store import Store
    from smokebox.sandbox.api import SandboxApi

Picture: TypeAlias = bytes | str | Path
"""The bytes of an image, the path of one in the workspace, or a `Path` of one on the host."""


def check_pictures(pictures: object) -> tuple[Picture, ...]:
    """The images of a prompt, once they are something that can be one."""
    if isinstance(pictures, (str, bytes, Path)) or not isinstance(pictures, Sequence):
        raise InvalidOption(
            "images is a list.", hint="Write images=[...].", option="images", value=type(pictures)
        )
    for picture in pictures:
        if isinstance(picture, bytes):
            media_type(picture, "an image")
        elif not isinstance(picture, (str, Path)):
            raise InvalidOption(
                f"{picture!r:.80} is not an image.",
                hint="Pass bytes, a path in the workspace, or a pathlib.Path on this host.",
                option="images",
            )
    return tuple(pictures)


async def keep(
    pictures: Sequence[Picture], store: Store, workspace: SandboxApi | None
) -> list[Image]:
    """Put images beside the record."""
    kept = []
    for picture in pictures:
        data = await _load(picture, workspace)
        name = picture if isinstance(picture, str) else "an image"
        kept.append(Image(media_type(data, str(name)), await store.put_blob(data), len(data)))
    return kept


def media_type(data: bytes, name: str) -> str:
    """What kind of image it is. Raises `InvalidOption` for one that no model takes."""
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidOption(
            f"images: {name} has {len(data)} bytes, more than the {MAX_IMAGE_BYTES} that models "
            "take.",
            hint="Scale it down first.",
            option="images",
            size=len(data),
            limit=MAX_IMAGE_BYTES,
        )
    found = image_type(data)
    if found is None:
        raise InvalidOption(
            f"images: {name} is none that models can look at.",
            hint="Convert it to PNG, JPEG, GIF or WebP.",
            option="images",
        )
    return found


async def _load(picture: Picture, workspace: SandboxApi | None) -> bytes:
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, Path):
        return await asyncio.to_thread(picture.read_bytes)
    if workspace is None:
        raise no_workspace("images")
    return await workspace.read_bytes(picture)
