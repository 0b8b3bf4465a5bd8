"""The read tool: lines of a text file, names in a directory, or an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.files import load
from smokebox.agents.tools.output import (
    MAX_BYTES,
    MAX_IMAGE_BYTES,
    MAX_LINES,
    count_fitting,
    head,
    image_type,
    one_line,
    shell_word,
)
from smokebox.agents.tools.tool import Tool, ToolImage, ToolResult, failure
from smokebox.errors import PathIsDirectory

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

MAX_ENTRIES = 1000
_SAMPLE_BYTES = 8192

DESCRIPTION = f"""\
Read a file. Returns text unchanged, at most {MAX_LINES} lines or {MAX_BYTES // 1024} KiB at a \
time; if there is more, the last line names the offset that continues. For a directory, returns \
the names in it, directories with a trailing slash. PNG, JPEG, GIF and WebP files are shown as \
images."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {
            "type": "string",
            "description": "File or directory; a relative path starts at the working directory.",
        },
        "offset": {
            "type": "integer",
            "minimum": 1,
            "description": "Line to start at, counted from 1. Default 1.",
        },
        "limit": {
            "type": "integer",
            "minimum": 1,
            "description": f"How many lines to read. Default and maximum {MAX_LINES}.",
        },
    },
    "required": ["path"],
    "additionalProperties": False,
}


def read_tool(sandbox: SandboxApi) -> Tool:
    """Return the tool `read` for a sandbox."""

    async def read(path: str, offset: int = 1, limit: int = MAX_LINES) -> ToolResult:
        try:
            data = await load(sandbox, path)
        except PathIsDirectory:
            return await _directory(sandbox, path, offset, min(limit, MAX_ENTRIES))
        return show(path, data, offset, min(limit, MAX_LINES))

    return Tool(name="read", description=DESCRIPTION, parameters=PARAMETERS, function=read)


def show(path: str, data: bytes, offset: int, limit: int) -> ToolResult:
    """Return a file as a model sees it: an image, or lines of text from `offset` on."""
    media_type = image_type(data)
    if media_type is not None:
        return _image(path, media_type, data)
    if _is_binary(data):
        name = shell_word(path)
        return failure(
            f"{path} is not text: {len(data)} bytes of binary data. Use bash to inspect it: "
            f"file {name}, xxd {name} | head, or iconv if it is text in another encoding."
        )
    return _text(path, data, offset, limit)


def _text(path: str, data: bytes, offset: int, limit: int) -> ToolResult:
    total = data.count(b"\n") + (not data.endswith(b"\n")) if data else 0
    if offset > max(1, total):
        return failure(f"Offset {offset} is beyond end of file ({total} lines total)")
    if not data:
        return ToolResult(text="(empty file)")
    if offset == 1 and len(data) <= MAX_BYTES and total <= limit:
        return ToolResult(text=_decode(data))
    lines = data.split(b"\n", offset - 1 + limit)[offset - 1 : min(total, offset - 1 + limit)]
    count = count_fitting(lines, limit)
    if count == 0:
        return _long_line(path, lines[0], offset, total)
    shown, last = b"\n".join(lines[:count]), offset - 1 + count
    if last < total:
        marker = f"[Showing lines {offset}-{last} of {total}. Use offset={last + 1} to continue.]"
        return ToolResult(text=f"{_decode(shown)}\n\n{marker}")
    return ToolResult(text=_decode(shown + (b"\n" if data.endswith(b"\n") else b"")))


def _long_line(path: str, line: bytes, number: int, total: int) -> ToolResult:
    shown = head(line, MAX_BYTES)
    rest = f"sed -n {number}p {shell_word(path)} | tail -c +{len(shown) + 1} | head -c {MAX_BYTES}"
    marker = f"[Line {number} of {total} has {len(line)} bytes and is cut after {len(shown)}."
    marker += f" For the next part use bash: {rest}"
    if number < total:
        marker += f" ; for the lines after it use offset={number + 1}"
    return ToolResult(text=f"{_decode(shown)}\n\n{marker}]")


def _decode(data: bytes) -> str:
    text = data.decode(errors="replace")
    if "\ufffd" in text and "\ufffd".encode() not in data:
        return f"{text}\n\n[\ufffd stands for bytes that are not UTF-8.]"
    return text


def _is_binary(data: bytes) -> bool:
    sample = head(data[: _SAMPLE_BYTES + 4], _SAMPLE_BYTES)
    # A few invalid bytes occur in logs and old encodings; a tenth of the sample is not text.
    return b"\0" in sample or sample.decode(errors="replace").count("\ufffd") > len(sample) // 10


def _image(path: str, media_type: str, data: bytes) -> ToolResult:
    if len(data) > MAX_IMAGE_BYTES:
        return failure(
            f"{path} is an image of {len(data)} bytes, more than the {MAX_IMAGE_BYTES} that can "
            "be shown. Make a smaller copy with bash and read that."
        )
    image = ToolImage(media_type=media_type, data=data)
    return ToolResult(text=f"{path}: {media_type}, {len(data)} bytes.", images=(image,))


async def _directory(sandbox: SandboxApi, path: str, offset: int, limit: int) -> ToolResult:
    names = await sandbox.readdir(path)
    if not names:
        return ToolResult(text="(empty directory)")
    if offset > len(names):
        return failure(f"Offset {offset} is beyond end of directory ({len(names)} entries total)")
    lines = await _mark_directories(sandbox, path, names[offset - 1 : offset - 1 + limit])
    last = offset - 1 + count_fitting(lines, limit)
    text = "\n".join(lines[: last - offset + 1])
    if last < len(names):
        text += f"\n\n[Showing entries {offset}-{last} of {len(names)}."
        text += f" Use offset={last + 1} to continue.]"
    return ToolResult(text=text)


async def _mark_directories(sandbox: SandboxApi, path: str, names: list[str]) -> list[str]:
    """Return the names, with a slash after those of directories."""
    # One glob finds the regular files, so that only the other names need a call each.
    files = set(await sandbox.glob("*", cwd=path, hidden=True, files_only=True))
    root = sandbox.resolve_path(path).rstrip("/")
    marked = []
    for name in names:
        full = f"{root}/{name}"
        is_directory = full not in files and await _is_directory(sandbox, full)
        marked.append(one_line(name) + "/" * is_directory)
    return marked


async def _is_directory(sandbox: SandboxApi, path: str) -> bool:
    try:
        return (await sandbox.stat(path)).is_directory
    except OSError:
        # A dangling symlink, or a file that was removed since it was listed.
        return False
