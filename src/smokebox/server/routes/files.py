"""Files of a sandbox: content, metadata and changes."""

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
from smokebox.server.downloads import download
from smokebox.server.endpoint import BYTES, ApiCall, endpoint
from smokebox.server.responses import SMALL, read_batches
from smokebox.types import DiskUsage, FileInfo
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
from smokebox.wire.responses import Exists, FileList, Names, PathResponse, Paths, Written

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.engine.files.files import Files

READ_ERRORS = (InvalidOption, InvalidPath, PathError, PathNotFound, AccessDenied, SandboxGone)
WRITE_ERRORS = (*READ_ERRORS, PathExists, StorageFull)
_BASE = "/sandboxes/{id}/files"


@endpoint("GET", _BASE, errors=READ_ERRORS, returns=BYTES)
async def read(call: ApiCall, query: Path) -> Response:
    """Read a file.

    The header Range requests one range of bytes. If the file is truncated while it is read, the
    connection is closed; bytes appended meanwhile are not sent.
    """
    return await download(call, call.sandbox.files, query.path)


@endpoint("PUT", _BASE, errors=(*WRITE_ERRORS, DeadlineExceeded), accepts=BYTES)
async def write(call: ApiCall, query: WriteFile) -> Written:
    """Write a file with the bytes of the body, and create its parent directories.

    The write is atomic: if the body is incomplete, the file is unchanged. With `append` bytes
    are added as they arrive, and stay if the body is incomplete.
    """
    files = call.sandbox.files
    async with contextlib.aclosing(read_batches(call)) as body:
        if query.append:
            return Written(await _append(files, query.path, body))
        if int(call.request.headers.get("content-length", "0")) > SMALL:
            return Written(await files.write_stream(query.path, body))
        first = await anext(body, b"")
        if len(first) <= SMALL:
            await files.write_file(query.path, first)
            return Written(len(first))
        return Written(await files.write_stream(query.path, _chain(first, body)))


@endpoint("DELETE", _BASE, errors=(*READ_ERRORS, DirectoryNotEmpty), slow=True)
async def remove(call: ApiCall, query: Remove) -> None:
    """Remove a file or a symlink, or with `recursive` a directory.

    With `force`, a missing path is not an error.
    """
    await call.sandbox.files.rm(query.path, recursive=query.recursive, force=query.force)


@endpoint("GET", f"{_BASE}/stat", errors=READ_ERRORS, slow=True)
async def stat(call: ApiCall, query: Stat) -> FileInfo:
    """Return the metadata of a path. A dangling symlink is not found if it is followed."""
    return await call.sandbox.files.stat(query.path, follow_symlinks=query.follow_symlinks)


@endpoint("GET", f"{_BASE}/list", errors=(*READ_ERRORS, LimitReached), slow=True)
async def list_all(call: ApiCall, query: ListFiles) -> FileList:
    """List a directory, with `recursive` the whole tree, sorted by path.

    Symlinks are not followed. Without `hidden`, names that start with a dot are left out, with
    everything below them.
    """
    files = call.sandbox.files
    return FileList(
        await files.list_files(query.path, recursive=query.recursive, hidden=query.hidden)
    )


@endpoint("GET", f"{_BASE}/names", errors=READ_ERRORS, slow=True)
async def names(call: ApiCall, query: Path) -> Names:
    """List the names in a directory, sorted, with dotfiles; invalid UTF-8 is `\\xNN`."""
    return Names(await call.sandbox.files.readdir(query.path))


@endpoint("GET", f"{_BASE}/exists", errors=READ_ERRORS, slow=True)
async def exists(call: ApiCall, query: Path) -> Exists:
    """Check that a path exists."""
    return Exists(await call.sandbox.files.exists(query.path))


@endpoint("GET", f"{_BASE}/glob", errors=(*READ_ERRORS, LimitReached), slow=True)
async def glob(call: ApiCall, query: Glob) -> Paths:
    """List the absolute paths that match a pattern, sorted. `**` matches any depth."""
    found = await call.sandbox.files.glob(
        query.pattern, cwd=query.cwd, hidden=query.hidden, files_only=query.files_only
    )
    return Paths(found)


@endpoint("GET", f"{_BASE}/readlink", errors=READ_ERRORS, slow=True)
async def readlink(call: ApiCall, query: Path) -> PathResponse:
    """Return the target of a symlink."""
    return PathResponse(await call.sandbox.files.readlink(query.path))


@endpoint("GET", f"{_BASE}/usage", errors=READ_ERRORS, slow=True)
async def usage(call: ApiCall, query: Path) -> DiskUsage:
    """Return the disk usage of a file or of a directory tree."""
    return await call.sandbox.files.disk_usage(query.path)


@endpoint("POST", f"{_BASE}/mkdir", errors=WRITE_ERRORS, slow=True)
async def mkdir(call: ApiCall, body: MakeDirectory) -> None:
    """Create a directory; `recursive` creates parents and accepts an existing directory."""
    await call.sandbox.files.mkdir(body.path, recursive=body.recursive)


@endpoint("POST", f"{_BASE}/rename", errors=(*WRITE_ERRORS, DirectoryNotEmpty), slow=True)
async def rename(call: ApiCall, body: Rename) -> None:
    """Rename a file or directory, replacing a file or an empty directory at the target."""
    await call.sandbox.files.rename(body.source, body.target)


@endpoint("POST", f"{_BASE}/move", errors=(*WRITE_ERRORS, DirectoryNotEmpty), slow=True)
async def move(call: ApiCall, body: Rename) -> PathResponse:
    """Move a file or directory as mv does: into the target if that is a directory.

    Returns the resulting path.
    """
    return PathResponse(await call.sandbox.files.move(body.source, body.target))


@endpoint("POST", f"{_BASE}/copy", errors=WRITE_ERRORS, slow=True)
async def copy(call: ApiCall, body: Transfer) -> None:
    """Copy a file, or with `recursive` a directory, with modes; symlinks stay symlinks."""
    await call.sandbox.files.copy(body.source, body.target, recursive=body.recursive)


@endpoint("POST", f"{_BASE}/symlink", errors=WRITE_ERRORS, slow=True)
async def symlink(call: ApiCall, body: Symlink) -> None:
    """Create a symlink. Its target is stored unchanged."""
    await call.sandbox.files.symlink(body.target, body.path)


@endpoint("POST", f"{_BASE}/chmod", errors=READ_ERRORS, slow=True)
async def chmod(call: ApiCall, body: SetMode) -> None:
    """Set the permission bits of a path, following symlinks."""
    await call.sandbox.files.chmod(body.path, body.mode)


@endpoint("POST", f"{_BASE}/chown", errors=(*READ_ERRORS, Unsupported), slow=True)
async def chown(call: ApiCall, body: SetOwner) -> None:
    """Set the owner of a file, and its group, by default the group with the user's number."""
    await call.sandbox.files.chown(body.path, body.uid, body.gid)


@endpoint("POST", f"{_BASE}/touch", errors=WRITE_ERRORS, slow=True)
async def touch(call: ApiCall, body: Touch) -> None:
    """Set the modification time of a file, by default to the current time. Creates the file."""
    await call.sandbox.files.touch(body.path, mtime=body.mtime)


async def _append(files: Files, path: str, body: AsyncGenerator[bytes, None]) -> int:
    first = await anext(body, b"")
    await files.append_file(path, first)
    written = len(first)
    async for piece in body:
        await files.append_file(path, piece)
        written += len(piece)
    return written


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
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
