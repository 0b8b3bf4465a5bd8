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
class UnpackedMessage:
    """A message as the agent receives it."""

    text: str
    images: Sequence[bytes]


def check_attachments(attachments: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidOption` unless each has a valid file name and base64 data."""
    for index, one in enumerate(attachments):
        name, where = one["name"], f"attachments[{index}]"
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise InvalidOption(
                f"{where}: {name!r:.80} is not a file name.",
                hint="Send a name without slashes.",
                option=where,
            )
        data = _decode(one["data"], where)
        if image_type(data) is not None:
            media_type(data, where)


async def unpack(harness: Harness, body: Mapping[str, Any]) -> UnpackedMessage:
    """Write the attached files to the workspace, and name their paths in the message."""
    text, images, paths = str(body["message"]), [], []
    for index, one in enumerate(body.get("attachments", ())):
        data = _decode(one["data"], f"attachments[{index}]")
        if image_type(data) is not None:
            images.append(data)
        else:
            path = f"{FOLDER}/{one['name']}"
            await harness.fs.write_file(path, data)
            paths.append(path)
    if paths:
        text += "\n\n" + "\n".join(f"[Attached file: {path}]" for path in paths)
    return UnpackedMessage(text, images)


def _decode(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidOption(
            f"{where}: data is not base64.", hint="Encode the bytes as base64.", option=where
        ) from None
