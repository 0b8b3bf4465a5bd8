"""File functions that the tools share: load, lock, and format paths as the model wrote them."""

from __future__ import annotations

import asyncio
import difflib
import posixpath
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from smokebox.agents.tools.output import one_line
from smokebox.errors import FileTooLarge, PathError, PathIsDirectory, PathNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.sandbox.api import SandboxApi

MAX_FILE_BYTES = 32 * 1024 * 1024

# Shared by all tools of the same sandbox. A lock lives while a task holds or awaits it. The loop
# is part of the key because an asyncio.Lock belongs to one loop.
_locks: WeakValueDictionary[tuple[int, int, str], asyncio.Lock] = WeakValueDictionary()


def path_lock(sandbox: SandboxApi, path: str) -> asyncio.Lock:
    """Return the lock that serializes changes of one file."""
    key = (id(sandbox), id(asyncio.get_running_loop()), sandbox.resolve_path(path))
    return _locks.setdefault(key, asyncio.Lock())


async def load(sandbox: SandboxApi, path: str) -> bytes:
    """Return the bytes of a regular file of at most 32 MiB. Raises `PathError`."""
    try:
        info = await sandbox.stat(path)
    except PathNotFound as error:
        raise PathNotFound(path, hint=await _nearest(sandbox, path)) from error
    if info.is_directory:
        raise PathIsDirectory(path, hint="Name a file in it.")
    if not info.is_file:
        raise PathError(path, f"not a regular file: {path}.", hint="Use bash to read from it.")
    if info.size is not None and info.size > MAX_FILE_BYTES:
        raise FileTooLarge(
            path,
            f"{path} has {info.size} bytes, more than the {MAX_FILE_BYTES} this tool reads.",
            hint="Use grep, or bash with sed -n, head or tail, for the part you need.",
        )
    return await sandbox.read_bytes(path)


def path_formatter(sandbox: SandboxApi, path: str) -> Callable[[str], str]:
    """Return a function that writes absolute paths below `path` the way `path` is written."""
    root = sandbox.resolve_path(path).rstrip("/")
    normal = posixpath.normpath(path)
    prefix = "" if normal == "." else f"{normal.rstrip('/')}/"

    def write(absolute: str) -> str:
        if absolute.startswith(f"{root}/"):
            return prefix + absolute[len(root) + 1 :]
        return path if absolute == root else absolute

    return write


async def _nearest(sandbox: SandboxApi, path: str) -> str:
    """Return a hint with similar names in the same directory, or ""."""
    directory, name = posixpath.split(sandbox.resolve_path(path))
    try:
        names = await sandbox.readdir(directory)
    except OSError:
        return f"There is no directory {directory} either."
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"In the same directory: {', '.join(map(one_line, near))}." if near else ""
