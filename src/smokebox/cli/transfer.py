"""Copies between this machine and a sandbox, and the progress of transfers and backups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from smokebox.cli.output import progress
from smokebox.errors import PathNotFound, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from smokebox.client.sandbox import Sandbox

T = TypeVar("T")

STREAM = "-"
_CHUNK = 1 << 16
_READ_AHEAD = 4
_POLL = 0.25


async def upload(sandbox: Sandbox, source: str, target: str) -> None:
    """Copy a local path, or standard input, to a path in the sandbox."""
    if source == STREAM:
        await sandbox.write_stream(target, _stdin_chunks())
        return
    path = _existing(source)
    if not _is_contents(source) and await _is_directory(sandbox, target):
        target = posixpath.join(target, os.path.basename(path))
    with progress(source) as update:
        await sandbox.upload(path, target, progress=update)


async def download(sandbox: Sandbox, source: str, target: str) -> None:
    """Copy a path in the sandbox to a local path, or to standard output."""
    if target == STREAM:
        async for chunk in sandbox.read_stream(source):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return
    info = await sandbox.stat(source)
    name = posixpath.basename(sandbox.resolve_path(source))
    if not (info.is_directory and _is_contents(source)):
        target = _target_path(target, name)
    with progress(source) as update:
        await sandbox.download(source, target, progress=update)


def _existing(source: str) -> str:
    path = os.path.abspath(source)
    if not os.path.lexists(path):
        raise PathNotFound(source)
    return path


def _target_path(target: str, name: str) -> str:
    return os.path.join(target, name) if os.path.isdir(target) else target


def _is_contents(source: str) -> bool:
    """Return whether the path is `folder/.`, for the contents of a directory."""
    return posixpath.basename(source) == "."


async def _is_directory(sandbox: Sandbox, path: str) -> bool:
    with contextlib.suppress(PathNotFound):
        return (await sandbox.stat(path)).is_directory
    return path.endswith("/")


async def _stdin_chunks() -> AsyncGenerator[bytes, None]:
    """Yield standard input as it arrives."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue(_READ_AHEAD)

    def read() -> None:
        while True:
            try:
                chunk: bytes | OSError = os.read(sys.stdin.fileno(), _CHUNK)
            except OSError as error:
                chunk = error
            try:
                asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            except RuntimeError:
                return
            if not isinstance(chunk, bytes) or not chunk:
                return

    # A daemon thread: a read that blocks does not keep this process from ending.
    threading.Thread(target=read, daemon=True).start()
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk


async def show_backup_progress(sandbox: Sandbox, name: str, work: Coroutine[Any, Any, T]) -> T:
    """Await a backup or a restore, with a progress bar in a terminal."""
    with progress(name) as update:
        if update is None:
            return await work
        task = asyncio.create_task(work)
        poll = asyncio.create_task(_poll_progress(sandbox, update))
        try:
            return await task
        finally:
            for one in (task, poll):
                one.cancel()
            await asyncio.wait((task, poll))


async def _poll_progress(sandbox: Sandbox, update: Callable[[int, int | None], None]) -> None:
    while True:
        await asyncio.sleep(_POLL)
        # The work itself reports its errors.
        with contextlib.suppress(SmokeboxError):
            if await sandbox.info() is None:
                continue
            for one in await sandbox.backup_progress():
                if one.begun:
                    update(one.bytes, one.total)
