"""What a tool's function returned, as the model is shown it."""

from __future__ import annotations

import dataclasses
import mimetypes
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from smokebox.agents.tools.images import MAX_IMAGE_BYTES, image_type
from smokebox.agents.tools.output import OutputFiles
from smokebox.agents.tools.tool import ToolImage, ToolResult, failure
from smokebox.agents.tools.truncation import MAX_BYTES, head

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

OUTPUT_DIRECTORY = "/tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFile:
    """A file for the model: written to `path` in the workspace, or shown where there is none.

    `path` is relative to the workspace's directory, unless it is absolute.
    """

    path: str
    data: str | bytes
    media_type: str | None = None


async def as_result(tool: str, value: object, sandbox: SandboxApi | None) -> ToolResult:
    """The result that stands for what a function returned: text, a value that JSON can hold,
    an image, a file, or a list that holds images or files."""
    if isinstance(value, ToolResult):
        return value
    if not isinstance(value, (list, tuple)) or not any(_is_part(item) for item in value):
        value = [value]
    parts = [await _part(tool, item, sandbox) for item in value]
    text = "\n\n".join(part.text for part in parts if part.text)
    return ToolResult(
        text=await _bounded(text, sandbox),
        is_error=any(part.is_error for part in parts),
        images=tuple(image for part in parts for image in part.images),
    )


def _is_part(value: object) -> bool:
    return isinstance(value, (ToolImage, ToolFile, ToolResult, bytes))


async def _part(tool: str, value: object, sandbox: SandboxApi | None) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(text=value or "(no output)")
    if value is None:
        return ToolResult(text="Done.")
    if isinstance(value, ToolImage):
        return _image(tool, value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _bytes(tool, bytes(value))
    if isinstance(value, ToolFile):
        return await _file(tool, value, sandbox)
    try:
        return ToolResult(text=_json(value))
    except (TypeError, ValueError) as error:
        return failure(
            f"{tool} ran, but what it returned cannot be shown: {error}. It is a fault of the "
            "tool: calling it again does not help."
        )


def _image(tool: str, image: ToolImage) -> ToolResult:
    size = len(image.data)
    if size > MAX_IMAGE_BYTES:
        return failure(
            f"{tool} gave an image of {size} bytes, more than the {MAX_IMAGE_BYTES} that can be "
            "shown. Ask it for a smaller one, if it can give one."
        )
    return ToolResult(text=f"An image: {image.media_type}, {size} bytes.", images=(image,))


def _bytes(tool: str, data: bytes) -> ToolResult:
    media_type = image_type(data)
    if media_type is not None:
        return _image(tool, ToolImage(media_type=media_type, data=data))
    return failure(
        f"{tool} ran, but gave {len(data)} bytes that are not a PNG, JPEG, GIF or WebP image. It "
        "is a fault of the tool, which should return text or a ToolFile."
    )


async def _file(tool: str, file: ToolFile, sandbox: SandboxApi | None) -> ToolResult:
    data = file.data.encode() if isinstance(file.data, str) else file.data
    kind = image_type(data) or file.media_type or mimetypes.guess_type(file.path)[0] or ""
    about = ", ".join(filter(None, [kind, f"{len(data)} bytes"]))
    if sandbox is not None:
        await sandbox.write_file(file.path, data)
        return ToolResult(text=f"Wrote {sandbox.resolve_path(file.path)} ({about}).")
    name = posixpath.basename(file.path)
    if image_type(data) is not None:
        return _image(tool, ToolImage(media_type=kind, data=data))
    try:
        return ToolResult(text=f"{name} ({about}):\n{data.decode()}")
    except UnicodeDecodeError:
        return failure(f"{tool} gave the file {name} ({about}), and there is no place to put it.")


async def _bounded(text: str, sandbox: SandboxApi | None) -> str:
    data = text.encode(errors="replace")
    if len(data) <= MAX_BYTES:
        return text
    shown = head(data, MAX_BYTES)
    where = "The rest was not kept."
    if sandbox is not None:
        where = await OutputFiles(sandbox, OUTPUT_DIRECTORY).keep(data)
    said = f"[Showing the first {len(shown)} of {len(data)} bytes. {where}]"
    return f"{shown.decode(errors='replace')}\n\n{said}"


def _json(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=_builtins).decode()


def _builtins(value: object) -> object:
    """What JSON can hold of a value that msgspec does not know: a pydantic model, mostly."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is neither text, JSON, an image nor a file")
