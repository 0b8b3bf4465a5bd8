"""Copies between this machine and a sandbox, where they go, and how far they are."""

from __future__ import annotations

import contextlib
import os
import posixpath
import sys
from typing import TYPE_CHECKING

from smokebox.cli.remote.progress import progress
from smokebox.cli.remote.stdin import stdin_pieces
from smokebox.errors import PathNotFound

if TYPE_CHECKING:
    from smokebox.client.sandbox import Sandbox

STREAM = "-"


async def upload(sandbox: Sandbox, source: str, target: str) -> None:
    """Copy a path here, or standard input, to a path in the sandbox."""
    if source == STREAM:
        await sandbox.write_stream(target, stdin_pieces())
        return
    path = _local(source)
    if not _is_contents(source) and await _is_directory(sandbox, target):
        target = posixpath.join(target, os.path.basename(path))
    with progress(source) as told:
        await sandbox.upload(path, target, progress=told)


async def download(sandbox: Sandbox, source: str, target: str) -> None:
    """Copy a path in the sandbox to a path here, or to standard output."""
    if target == STREAM:
        async for piece in sandbox.read_stream(source):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    info = await sandbox.stat(source)
    name = posixpath.basename(sandbox.resolve_path(source))
    if not (info.is_directory and _is_contents(source)):
        target = _into(target, name)
    with progress(source) as told:
        await sandbox.download(source, target, progress=told)


def _local(source: str) -> str:
    path = os.path.abspath(source)
    if not os.path.lexists(path):
        raise PathNotFound(source)
    return path


def _into(target: str, name: str) -> str:
    return os.path.join(target, name) if os.path.isdir(target) else target


def _is_contents(source: str) -> bool:
    """Whether `folder/.` was written, for what is in a directory and not itself."""
    return posixpath.basename(source) == "."


async def _is_directory(sandbox: Sandbox, path: str) -> bool:
    with contextlib.suppress(PathNotFound):
        return (await sandbox.stat(path)).is_directory
    return path.endswith("/")
