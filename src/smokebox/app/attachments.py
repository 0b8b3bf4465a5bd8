"""Attachments of a message: images for the model, and files for the workspace."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smokebox.agents.images import media_type
from smokebox.agents.tools.output import image_type
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.agents.harness import Harness

FOLDER = "attachments"
_NAME = re.compile(r"[^/\0]{1,200}")


@dataclass(frozen=True, slots=True)
class Given:
    """A message as the agent receives it."""

    text: str
    images: Sequence[bytes]


def check_attachments(attachments: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidOption` unless each has a valid file name and base64 data."""
    for place, one in enumerate(attachments):
        name, where = one["name"], f"attachments[{place}]"
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise InvalidOption(
                f"{where}: {name!r:.80} is not a file name.",
                hint="Send a name without slashes.",
                option=where,
            )
        data = _decoded(one["data"], where)
        if image_type(data) is not None:
            media_type(data, where)


async def unpack(harness: Harness, body: Mapping[str, Any]) -> Given:
    """Write the attached files to the workspace, and name their paths in the message."""
    text, images, places = str(body["message"]), [], []
    for place, one in enumerate(body.get("attachments", ())):
        data = _decoded(one["data"], f"attachments[{place}]")
        if image_type(data) is not None:
            images.append(data)
        else:
            path = f"{FOLDER}/{one['name']}"
            await harness.fs.write_file(path, data)
            places.append(path)
    if places:
        text += "\n\n" + "\n".join(f"[Attached file: {path}]" for path in places)
    return Given(text, images)


def _decoded(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidOption(
            f"{where}: data is not base64.", hint="Encode the bytes as base64.", option=where
        ) from None
