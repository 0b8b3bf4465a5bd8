"""Output of tools as a model sees it: truncated, with the whole output in a file."""

from __future__ import annotations

import dataclasses
import json
import mimetypes
import posixpath
import re
import shlex
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from smokebox.agents.tools.tool import ToolImage, ToolResult, failure
from smokebox.errors import SmokeboxError
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import ExecResult


MAX_LINES = 2000
MAX_BYTES = 50 * 1024
MAX_LINE_BYTES = 500


def head(data: bytes, limit: int) -> bytes:
    """Return the first `limit` bytes, or fewer so as not to split a character."""
    if len(data) <= limit:
        return data
    end = limit
    # A character has at most three continuation bytes; more of them is not UTF-8.
    while end > max(0, limit - 3) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


def tail(data: bytes, limit: int) -> bytes:
    """Return the last `limit` bytes, or fewer so as not to split a character."""
    start = max(0, len(data) - limit)
    last = min(len(data), start + 3)
    while 0 < start < last and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def count_fitting(lines: Iterable[str | bytes], limit: int) -> int:
    """Return how many lines fit in `limit` lines and `MAX_BYTES`, with the breaks between."""
    count, left = 0, MAX_BYTES + 1
    for line in lines:
        left -= len(line.encode() if isinstance(line, str) else line) + 1
        if count == limit or left < 0:
            break
        count += 1
    return count


def shorten_line(line: str, limit: int = MAX_LINE_BYTES) -> str:
    """Return `line`, or its first `limit` bytes and an ellipsis."""
    data = line.encode()
    return line if len(data) <= limit else head(data, limit).decode() + "..."


def one_line(path: str) -> str:
    """Return `path`, as a JSON string if it has characters such as line breaks."""
    return path if path.isprintable() else json.dumps(path, ensure_ascii=False)


def shell_word(path: str) -> str:
    """Return `path` quoted for a shell command."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


# 5 MiB in base64, the smallest limit of any provider.
MAX_IMAGE_BYTES = 5 * 1024 * 1024 * 3 // 4

_MAGIC = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
}


def image_type(data: bytes) -> str | None:
    """Return the media type of a PNG, JPEG, GIF or WebP image by its first bytes, else None."""
    return next((kind for kind, magic in _MAGIC.items() if magic.match(data)), None)


# Both ends together are below the 10 MB limit of a file in the virtual sandbox.
MAX_BYTES_PER_END = 4 * 1024 * 1024
MAX_OUTPUT_FILES = 16
OUTPUT_DIRECTORY = "/tmp"


class OutputBuffer:
    """Start and end of a command's output, in bounded memory."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        self._line_breaks = 0

    def add(self, text: str) -> None:
        """Append output."""
        data = text.encode()
        self._size += len(data)
        self._line_breaks += data.count(b"\n")
        if not self._tail and len(self._head) + len(data) <= MAX_BYTES_PER_END:
            self._head += data
            return
        self._tail += data
        if len(self._tail) > 2 * MAX_BYTES_PER_END:
            del self._tail[:-MAX_BYTES_PER_END]

    async def render(self, files: OutputFiles, result: ExecResult) -> str:
        """Return the output, or its end after a line with the size and where the whole is."""
        kept = self._kept()
        end = _last_lines(kept)
        if len(end) == self._size:
            return end.decode().rstrip("\n")
        lines = end.count(b"\n") + (not end.endswith(b"\n"))
        total = self._line_breaks + (not kept.endswith(b"\n"))
        where = _kept_by_sandbox(result) or await files.write(kept)
        marker = f"[Showing the last {lines} of {total} lines, {len(end)} of {self._size} bytes."
        return f"{marker} {where}]\n{end.decode()}".rstrip("\n")

    def _kept(self) -> bytes:
        rest = tail(bytes(self._tail), MAX_BYTES_PER_END)
        left_out = self._size - len(self._head) - len(rest)
        gap = f"\n[{left_out} bytes of the output were not kept.]\n".encode() if left_out else b""
        return b"".join((self._head, gap, rest))


class OutputFiles:
    """Files in the sandbox with whole outputs; the oldest are removed."""

    def __init__(self, sandbox: SandboxApi, directory: str) -> None:
        self._sandbox = sandbox
        self._directory = directory.rstrip("/")
        self._paths: deque[str] = deque()

    async def write(self, data: bytes) -> str:
        """Write a file, and return a sentence with its path or with the error."""
        path = f"{self._directory}/{new_id('smokebox-output')}.txt"
        try:
            await self._sandbox.write_file(path, data)
            self._paths.append(path)
            if len(self._paths) > MAX_OUTPUT_FILES:
                await self._sandbox.rm(self._paths.popleft(), force=True)
        except SmokeboxError as error:
            return f"The rest could not be kept: {error.message}"
        return f"The output is in {path}."


def _kept_by_sandbox(result: ExecResult) -> str:
    """Return a sentence with the files in which the sandbox itself kept the output, or ""."""
    if result.stdout_file is None:
        return ""
    errors = f", standard error in {result.stderr_file}" if result.stderr_file else ""
    return f"The output is in {result.stdout_file}{errors}."


def _last_lines(data: bytes) -> bytes:
    """Return the last whole lines that fit, or the last bytes if long lines would waste space."""
    body = data.removesuffix(b"\n")
    lines = body[-MAX_BYTES - 1 :].split(b"\n")
    count = count_fitting(reversed(lines), MAX_LINES)
    end = b"\n".join(lines[len(lines) - count :])
    if count < MAX_LINES and len(end) < MAX_BYTES // 2:
        return tail(data, MAX_BYTES)
    return end + data[len(body) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFile:
    """A file for the model: written to `path` in the workspace, or shown if there is none.

    A relative `path` starts at the working directory.
    """

    path: str
    data: str | bytes
    media_type: str | None = None


async def as_result(tool: str, value: object, sandbox: SandboxApi | None) -> ToolResult:
    """Convert the return value of a tool's function to a result.

    Args:
        tool: Name of the tool.
        value: Text, a value that can be encoded as JSON, an image, a file, or a list with
            images or files.
        sandbox: Workspace to write files to.
    """
    if isinstance(value, ToolResult):
        return value
    if not isinstance(value, (list, tuple)) or not any(_is_part(item) for item in value):
        value = [value]
    parts = [await _part(tool, item, sandbox) for item in value]
    text = "\n\n".join(part.text for part in parts if part.text)
    return ToolResult(
        text=await _truncate(text, sandbox),
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
        return ToolResult(text=msgspec.json.encode(value, enc_hook=_to_builtins).decode())
    except (TypeError, ValueError) as error:
        return failure(
            f"{tool} ran, but its return value cannot be shown: {error}. This is a bug in the "
            "tool: calling it again does not help."
        )


def _image(tool: str, image: ToolImage) -> ToolResult:
    size = len(image.data)
    if size > MAX_IMAGE_BYTES:
        return failure(
            f"{tool} returned an image of {size} bytes, more than the {MAX_IMAGE_BYTES} that can "
            "be shown. Call it for a smaller one, if it can make one."
        )
    return ToolResult(text=f"An image: {image.media_type}, {size} bytes.", images=(image,))


def _bytes(tool: str, data: bytes) -> ToolResult:
    media_type = image_type(data)
    if media_type is not None:
        return _image(tool, ToolImage(media_type=media_type, data=data))
    return failure(
        f"{tool} ran, but returned {len(data)} bytes that are not a PNG, JPEG, GIF or WebP image. "
        "This is a bug in the tool, which should return text or a ToolFile."
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
        return failure(
            f"{tool} returned the file {name} ({about}), and there is no workspace to write it to."
        )


async def _truncate(text: str, sandbox: SandboxApi | None) -> str:
    data = text.encode(errors="replace")
    if len(data) <= MAX_BYTES:
        return text
    shown = head(data, MAX_BYTES)
    where = "The rest was not kept."
    if sandbox is not None:
        where = await OutputFiles(sandbox, OUTPUT_DIRECTORY).write(data)
    marker = f"[Showing the first {len(shown)} of {len(data)} bytes. {where}]"
    return f"{shown.decode(errors='replace')}\n\n{marker}"


def _to_builtins(value: object) -> object:
    """Convert a value that msgspec does not know, such as a pydantic model."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is neither text, JSON, an image nor a file")
