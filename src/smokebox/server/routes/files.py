"""Files of a sandbox: their bytes, what is known of them, and changes to them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from starlette.responses import Response

from smokebox.errors import (
    AccessDenied,
    DeadlineExceeded,
    DirectoryNotEmpty,
    InvalidOption,
    InvalidPath,
    LimitReached,
    PathError,
    PathExists,
    PathNotFound,
    SandboxGone,
    StorageFull,
    Unsupported,
)
from smokebox.server.call import Call
from smokebox.server.downloads import download
from smokebox.server.endpoint import BYTES, endpoint
from smokebox.server.streams import SMALL, batches
from smokebox.types import DiskUsage, FileInfo
from smokebox.wire.answers import Exists, FileList, Names, PathAnswer, Paths, Written
from smokebox.wire.requests import (
    Glob,
    ListFiles,
    MakeDirectory,
    Path,
    Remove,
    Rename,
    SetMode,
    SetOwner,
    Stat,
    Symlink,
    Touch,
    Transfer,
    WriteFile,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.engine.files.files import Files

LOOKING = (InvalidOption, InvalidPath, PathError, PathNotFound, AccessDenied, SandboxGone)
CHANGING = (*LOOKING, PathExists, StorageFull)
_BASE = "/sandboxes/{id}/files"


@endpoint("GET", _BASE, errors=LOOKING, gives=BYTES)
async def read(call: Call, query: Path) -> Response:
    """Read a file.

    The header Range asks for a part of it: one range of bytes. A file that is cut short
    while it is read breaks the connection off; what is appended meanwhile is not sent.
    """
    return await download(call, call.sandbox.files, query.path)


@endpoint("PUT", _BASE, errors=(*CHANGING, DeadlineExceeded), takes=BYTES)
async def write(call: Call, query: WriteFile) -> Written:
    """Make or replace a file, and its parent directories, with the bytes of the body.

    All or nothing: if the body breaks off, the file is as it was. With `append` they are
    added to what is there as they come, and what came stays.
    """
    files = call.sandbox.files
    async with contextlib.aclosing(batches(call)) as body:
        if query.append:
            return Written(await _append(files, query.path, body))
        if int(call.request.headers.get("content-length", "0")) > SMALL:
            return Written(await files.write_stream(query.path, body))
        first = await anext(body, b"")
        if len(first) <= SMALL:
            await files.write_file(query.path, first)
            return Written(len(first))
        return Written(await files.write_stream(query.path, _chained(first, body)))


@endpoint("DELETE", _BASE, errors=(*LOOKING, DirectoryNotEmpty), slow=True)
async def remove(call: Call, query: Remove) -> None:
    """Remove a file or a symlink, or with `recursive` a directory.

    With `force`, one that is not there is fine.
    """
    await call.sandbox.files.rm(query.path, recursive=query.recursive, force=query.force)


@endpoint("GET", f"{_BASE}/stat", errors=LOOKING, slow=True)
async def stat(call: Call, query: Stat) -> FileInfo:
    """What is at a path. A symlink that leads nowhere is not found, unless not followed."""
    return await call.sandbox.files.stat(query.path, follow_symlinks=query.follow_symlinks)


@endpoint("GET", f"{_BASE}/list", errors=(*LOOKING, LimitReached), slow=True)
async def list_all(call: Call, query: ListFiles) -> FileList:
    """What is in a directory, or with `recursive` below it, by path; symlinks as themselves.

    Without `hidden`, names with a leading dot and what is below them are left out.
    """
    files = call.sandbox.files
    return FileList(
        await files.list_files(query.path, recursive=query.recursive, hidden=query.hidden)
    )


@endpoint("GET", f"{_BASE}/names", errors=LOOKING, slow=True)
async def names(call: Call, query: Path) -> Names:
    """The names in a directory, dotfiles too, sorted; bytes that are not UTF-8 as `\\xNN`."""
    return Names(await call.sandbox.files.readdir(query.path))


@endpoint("GET", f"{_BASE}/exists", errors=LOOKING, slow=True)
async def exists(call: Call, query: Path) -> Exists:
    """Whether a path leads to something."""
    return Exists(await call.sandbox.files.exists(query.path))


@endpoint("GET", f"{_BASE}/glob", errors=(*LOOKING, LimitReached), slow=True)
async def glob(call: Call, query: Glob) -> Paths:
    """Absolute paths that match a pattern, sorted. `**` matches directories of any depth."""
    found = await call.sandbox.files.glob(
        query.pattern, cwd=query.cwd, hidden=query.hidden, files_only=query.files_only
    )
    return Paths(found)


@endpoint("GET", f"{_BASE}/readlink", errors=LOOKING, slow=True)
async def readlink(call: Call, query: Path) -> PathAnswer:
    """Where a symlink leads."""
    return PathAnswer(await call.sandbox.files.readlink(query.path))


@endpoint("GET", f"{_BASE}/usage", errors=LOOKING, slow=True)
async def usage(call: Call, query: Path) -> DiskUsage:
    """What a file, or a directory with all that is below it, takes of the disk."""
    return await call.sandbox.files.disk_usage(query.path)


@endpoint("POST", f"{_BASE}/mkdir", errors=CHANGING, slow=True)
async def mkdir(call: Call, body: MakeDirectory) -> None:
    """Make a directory; `recursive` makes parents and accepts one that is there."""
    await call.sandbox.files.mkdir(body.path, recursive=body.recursive)


@endpoint("POST", f"{_BASE}/rename", errors=(*CHANGING, DirectoryNotEmpty), slow=True)
async def rename(call: Call, body: Rename) -> None:
    """Give a file or directory another path, replacing a file or an empty directory."""
    await call.sandbox.files.rename(body.source, body.target)


@endpoint("POST", f"{_BASE}/move", errors=(*CHANGING, DirectoryNotEmpty), slow=True)
async def move(call: Call, body: Rename) -> PathAnswer:
    """As rename, but into a directory that is there, as mv does. Says where it is then."""
    return PathAnswer(await call.sandbox.files.move(body.source, body.target))


@endpoint("POST", f"{_BASE}/copy", errors=CHANGING, slow=True)
async def copy(call: Call, body: Transfer) -> None:
    """Copy a file, or with `recursive` a directory, with modes; links in it stay links."""
    await call.sandbox.files.copy(body.source, body.target, recursive=body.recursive)


@endpoint("POST", f"{_BASE}/symlink", errors=CHANGING, slow=True)
async def symlink(call: Call, body: Symlink) -> None:
    """Make a symlink, whose target is kept as it is written."""
    await call.sandbox.files.symlink(body.target, body.path)


@endpoint("POST", f"{_BASE}/chmod", errors=LOOKING, slow=True)
async def chmod(call: Call, body: SetMode) -> None:
    """Set the permission bits of what a path leads to."""
    await call.sandbox.files.chmod(body.path, body.mode)


@endpoint("POST", f"{_BASE}/chown", errors=(*LOOKING, Unsupported), slow=True)
async def chown(call: Call, body: SetOwner) -> None:
    """Give a file to a user of the sandbox, and to a group (by default of that number)."""
    await call.sandbox.files.chown(body.path, body.uid, body.gid)


@endpoint("POST", f"{_BASE}/touch", errors=CHANGING, slow=True)
async def touch(call: Call, body: Touch) -> None:
    """Set the time of the last change, by default to this moment, making the file."""
    await call.sandbox.files.touch(body.path, mtime=body.mtime)


async def _append(files: Files, path: str, body: AsyncGenerator[bytes, None]) -> int:
    first = await anext(body, b"")
    await files.append_file(path, first)
    written = len(first)
    async for piece in body:
        await files.append_file(path, piece)
        written += len(piece)
    return written


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for piece in rest:
        yield piece


ENDPOINTS = [
    read,
    write,
    stat,
    exists,
    list_all,
    names,
    remove,
    glob,
    mkdir,
    rename,
    move,
    copy,
    symlink,
    readlink,
    usage,
    chmod,
    chown,
    touch,
]
