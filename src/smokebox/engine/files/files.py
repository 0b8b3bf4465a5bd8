"""Asynchronous access to the files of one sandbox, without a process in it.

`rooted_files` confines paths to the root, `credentials` sets the identity of the threads, and
`workers` handles cancellation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.disk_ledger import unlimited
from smokebox.engine.files import operations
from smokebox.engine.files.archive_reader import extract
from smokebox.engine.files.archive_writer import pack
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.observer import WatchOptions
from smokebox.engine.files.rooted_files import MAX_READ, RootedFiles
from smokebox.engine.files.watches import EXCLUDED, LINGER_SECONDS, Watches
from smokebox.engine.run import RunPart
from smokebox.errors import InvalidOption
from smokebox.foundation.paths import check_path, resolve
from smokebox.foundation.text import decode_file, encode_option
from smokebox.types import DiskUsage, Extracted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.disk_ledger import DiskBudget
    from smokebox.engine.files.watches import WatchStream
    from smokebox.engine.jail.spec import Owner
    from smokebox.engine.workers import Workers
    from smokebox.types import FileInfo

MAX_OFFSET = (1 << 63) - 1
# Beyond the range of every filesystem.
MAX_SECONDS = 1 << 40


class Files(RunPart):
    """The files of a sandbox. Every method raises the classes of `smokebox.errors`.

    `root` returns the descriptor and the owner of the sandbox's root, and wakes the sandbox if
    needed. `cwd` returns the absolute directory of relative paths, which is final only after the
    first wake. `budget` provides the room for one write below the disk limit: a write that would
    pass it raises `LimitReached`, and does not begin.
    """

    def __init__(
        self,
        root: Callable[[], Awaitable[tuple[int, Owner]]],
        *,
        workers: Workers,
        cwd: Callable[[], str] = lambda: "/workspace",
        max_read: int = MAX_READ,
        linger: float = LINGER_SECONDS,
        budget: Callable[[], AbstractAsyncContextManager[DiskBudget]] = unlimited,
    ) -> None:
        self._root = root
        self._budget = budget
        self._cwd = cwd
        self._cwd_known = False
        self._max_read = max_read
        self._executor = RootExecutor(root, workers)
        self._watches = Watches(self._executor, linger=linger)

    @property
    def busy(self) -> bool:
        """True while a call runs or a stream is open."""
        return self._executor.active > len(self._watches) or self._watches.readers > 0

    def resolve_path(self, path: str) -> str:
        """Return the absolute form of `path`, without access to any file."""
        return resolve(path, self._cwd())

    async def read_file(self, path: str) -> str:
        """Return the text of a file. Raises `NotText` unless it is UTF-8."""
        data = await self.read_bytes(path)
        return decode_file(self.resolve_path(path), data)

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file. Raises `FileTooLarge` above `max_read`."""
        return await self._executor.run(
            RootedFiles.read, await self._resolve(path), limit=self._max_read
        )

    async def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """Return a part of a file, shorter if the file ends before."""
        offset = _count("offset", offset)
        if length is not None:
            length = _count("length", length)
        absolute = await self._resolve(path)
        return await self._executor.run(
            RootedFiles.read_range, absolute, offset, length, limit=self._max_read
        )

    async def read_stream(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield a file of any size in chunks."""
        offset = _count("offset", offset)
        if length is not None:
            length = _count("length", length)
        generator = await self._executor.open(
            RootedFiles.chunks, await self._resolve(path), offset, length
        )
        async with generator:
            while (chunk := await generator.next()) is not None:
                yield chunk

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace a file and its parent directories, atomically."""
        content = encode_option("data", data)
        absolute = await self._resolve(path)
        async with self._budget() as budget:
            await budget.reserve(len(content))
            await self._executor.run(RootedFiles.write, absolute, content)

    async def write_stream(self, path: str, chunks: AsyncIterable[bytes]) -> int:
        """Like `write_file`, from a stream of any size. Returns the number of bytes."""
        generator = await self._executor.open(RootedFiles.write_chunks, await self._resolve(path))
        written = 0
        async with generator, self._budget() as budget:
            await generator.next()
            async for chunk in chunks:
                data = encode_option("chunks", chunk)
                await budget.reserve(len(data))
                await generator.send(data)
                written += len(data)
            await generator.send(None)
        return written

    async def append_file(self, path: str, data: str | bytes) -> None:
        """Append to a file, creating it and its parents. Not atomic."""
        content = encode_option("data", data)
        absolute = await self._resolve(path)
        async with self._budget() as budget:
            await budget.reserve(len(content))
            await self._executor.run(RootedFiles.append, absolute, content)

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the metadata of `path`. Following a dangling symlink raises `PathNotFound`."""
        absolute = await self._resolve(path)
        return await self._executor.run(RootedFiles.info, absolute, follow_symlinks=follow_symlinks)

    async def readdir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, with dotfiles; non-UTF-8 bytes as `\\xNN`."""
        return await self._executor.run(RootedFiles.names, await self._resolve(path))

    async def list_files(
        self, path: str, *, recursive: bool = False, hidden: bool = False
    ) -> list[FileInfo]:
        """Return the entries in or below a directory by path, without following symlinks."""
        absolute = await self._resolve(path)
        return await self._executor.run(
            operations.list_files, absolute, recursive=recursive, hidden=hidden
        )

    async def exists(self, path: str) -> bool:
        """Return whether `path` leads to something."""
        return await self._executor.run(RootedFiles.exists, await self._resolve(path))

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory; `recursive` creates parents and accepts an existing directory."""
        absolute = await self._resolve(path)
        await self._executor.run(RootedFiles.make_directory, absolute, recursive=recursive)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory. Never the root."""
        absolute = await self._resolve(path)
        await self._executor.run(RootedFiles.remove, absolute, recursive=recursive, force=force)

    async def rename(self, source: str, target: str) -> None:
        """Move a file or directory, replacing a file or an empty directory."""
        old, new = await self._resolve(source), await self._resolve(target)
        await self._executor.run(operations.rename, old, new)

    async def move(self, source: str, target: str) -> str:
        """Like `rename`, but into an existing directory, as mv does. Returns the final path."""
        old, new = await self._resolve(source), await self._resolve(target)
        return await self._executor.run(operations.move, old, new)

    async def copy(self, source: str, target: str, *, recursive: bool = False) -> None:
        """Copy a file, or with `recursive` a directory, with modes; symlinks stay symlinks."""
        old, new = await self._resolve(source), await self._resolve(target)
        async with self._budget() as budget:
            await budget.reserve((await self.disk_usage(old)).bytes)
            await self._executor.run(operations.copy, old, new, recursive=recursive)

    async def symlink(self, target: str, path: str) -> None:
        """Create a symlink at `path`; `target` is stored as it is."""
        await self._executor.run(RootedFiles.symlink, check_path(target), await self._resolve(path))

    async def readlink(self, path: str) -> str:
        """Return the target of the symlink at `path`."""
        return await self._executor.run(RootedFiles.readlink, await self._resolve(path))

    async def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits of the target of a path."""
        if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
            raise InvalidOption(
                f"mode is a number from 0 to 0o7777, not {mode!r}.",
                hint="Pass for example mode=0o755.",
                option="mode",
                value=mode,
            )
        await self._executor.run(RootedFiles.chmod, await self._resolve(path), mode)

    async def chown(self, path: str, uid: int, gid: int | None = None) -> None:
        """Set the owner of a file to ids of the sandbox; `gid` is `uid` by default."""
        uid = _count("uid", uid)
        gid = uid if gid is None else _count("gid", gid)
        await self._executor.run(RootedFiles.chown, await self._resolve(path), uid, gid)

    async def touch(self, path: str, *, mtime: float | None = None) -> None:
        """Set the modification time, by default to now; creates a missing file."""
        if mtime is not None and not abs(mtime) < MAX_SECONDS:
            raise InvalidOption(
                f"mtime is seconds since 1970, not {mtime!r}.",
                hint="Pass for example time.time().",
                option="mtime",
                value=mtime,
            )
        await self._executor.run(RootedFiles.touch, await self._resolve(path), mtime)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Return the sorted absolute paths that match. See `SandboxApi.glob`."""
        start = await self._resolve(cwd or ".")
        return await self._executor.run(
            operations.glob, pattern, start, hidden=hidden, files_only=files_only
        )

    async def disk_usage(self, path: str = "/") -> DiskUsage:
        """Measure a file, or a directory with everything below it."""
        return await self._executor.run(operations.disk_usage, await self._resolve(path))

    async def upload_tar(
        self,
        path: str,
        stream: AsyncIterable[bytes],
        *,
        keep_owner: bool = False,
        max_bytes: int | None = None,
    ) -> Extracted:
        """Extract a tar archive, gzipped or not, into a directory, which is created if needed.

        Nothing is written outside the directory. The fields `member`, `files` and `bytes` of an
        error say how far it got; files extracted before stay.
        """
        absolute = await self._resolve(path)
        result = Extracted()
        async with self._budget() as budget:
            generator = await self._executor.open(
                extract,
                absolute,
                result,
                keep_owner=keep_owner,
                max_bytes=max_bytes,
                take=budget.take_file,
            )
            async with generator:
                await generator.next()
                async for chunk in stream:
                    await generator.send(encode_option("stream", chunk))
                await generator.send(b"")
        return result

    async def download_tar(
        self, path: str, *, compress: bool = False, exclude: Sequence[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yield a tar archive of a directory or a file in chunks.

        Names are relative to the directory. Entries other than files, directories and symlinks
        are omitted, and so is what `exclude` matches.
        """
        generator = await self._executor.open(
            pack, await self._resolve(path), compress=compress, exclude=tuple(exclude)
        )
        async with generator:
            while (chunk := await generator.next()) is not None:
                yield chunk

    async def watch(
        self,
        path: str,
        *,
        recursive: bool = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] = EXCLUDED,
        cursor: str | None = None,
    ) -> WatchStream:
        """Watch a path from now on, or since `cursor`.

        Changes after the return are reported. See `WatchStream`.
        """
        absolute = await self._resolve(path)
        options = WatchOptions(absolute, recursive, tuple(include), tuple(exclude))
        return await self._watches.start(options, cursor)

    async def _resolve(self, path: str) -> str:
        """Return the absolute form of `path`, waking the sandbox if it depends on the cwd."""
        absolute = self.resolve_path(path)
        if self._cwd_known or path.startswith("/"):
            return absolute
        # The image may set it, and is not read before the first run.
        await self._root()
        self._cwd_known = True
        return self.resolve_path(path)

    async def ended(self, reason: str) -> None:
        """Release the root of a run that ended."""
        await self.release()

    async def release(self) -> None:
        """End every stream, watch and call, so that nothing holds the sandbox's root.

        Later calls request the root again.
        """
        await self._watches.release()
        await self._executor.release()


def _count(option: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_OFFSET:
        raise InvalidOption(
            f"{option} is a number of at least 0, not {value!r}.",
            hint=f"Pass for example {option}=0.",
            option=option,
            value=value,
        )
    return value
