"""The files of one sandbox, reached from outside, as the contract spells them and more.

No process runs in the sandbox for it. What a path may lead to is in `rooted`, who acts
in `credentials`, and what happens to a call that is cancelled in `workers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.files import operations
from smokebox.engine.files.archive_reader import extract
from smokebox.engine.files.archive_writer import pack
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.rooted import MAX_READ, Rooted
from smokebox.engine.files.watches import EXCLUDED, LINGER, Watches
from smokebox.errors import InvalidOption
from smokebox.foundation.paths import check_path, resolve
from smokebox.foundation.text import decode_file, encode_option
from smokebox.types import DiskUsage, Extracted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence

    from smokebox.engine.files.watches import WatchStream
    from smokebox.engine.jail.api import Owner
    from smokebox.engine.workers import Workers
    from smokebox.types import FileInfo

MAX_OFFSET = (1 << 63) - 1
# As far as any filesystem counts.
MOST_SECONDS = 1 << 40


class Files:
    """The files of a sandbox.

    `root` gives the descriptor and the owner of the sandbox's root, waking it if need be;
    relative paths start at what `cwd` says once it was awake, an absolute directory.
    Everything raises the classes of `smokebox.errors`.
    """

    def __init__(
        self,
        root: Callable[[], Awaitable[tuple[int, Owner]]],
        *,
        workers: Workers,
        cwd: Callable[[], str] = lambda: "/workspace",
        max_read: int = MAX_READ,
        linger: float = LINGER,
    ) -> None:
        self._root = root
        self._cwd = cwd
        self._cwd_known = False
        self._max_read = max_read
        self._desk = RootExecutor(root, workers)
        self._watches = Watches(self._desk, linger=linger)

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or a stream is open."""
        return self._desk.at_work > len(self._watches) or self._watches.readers > 0

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`, without looking at any file."""
        return resolve(path, self._cwd())

    async def read_file(self, path: str) -> str:
        """The text of a file. Raises `NotText` where it is not UTF-8."""
        data = await self.read_bytes(path)
        return decode_file(self.resolve_path(path), data)

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a file, which `FileTooLarge` refuses over `max_read`."""
        return await self._desk.run(Rooted.read, await self._resolved(path), limit=self._max_read)

    async def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """A part of a file; what is beyond its end is left out."""
        offset = _count("offset", offset)
        if length is not None:
            length = _count("length", length)
        where = await self._resolved(path)
        return await self._desk.run(Rooted.read_range, where, offset, length, limit=self._max_read)

    async def read_stream(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """A file of any size, piece by piece."""
        offset = _count("offset", offset)
        if length is not None:
            length = _count("length", length)
        steps = await self._desk.open(Rooted.chunks, await self._resolved(path), offset, length)
        try:
            while (chunk := await steps.next()) is not None:
                yield chunk
        finally:
            await steps.aclose()

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Make or replace a file, and its parent directories. All or nothing."""
        content = encode_option("data", data)
        await self._desk.run(Rooted.write, await self._resolved(path), content)

    async def write_stream(self, path: str, chunks: AsyncIterable[bytes]) -> int:
        """As `write_file`, from bytes of any amount as they come. Returns how many."""
        steps = await self._desk.open(Rooted.write_chunks, await self._resolved(path))
        written = 0
        try:
            await steps.next()
            async for chunk in chunks:
                data = encode_option("chunks", chunk)
                await steps.send(data)
                written += len(data)
            await steps.send(None)
        finally:
            await steps.aclose()
        return written

    async def append_file(self, path: str, data: str | bytes) -> None:
        """Add to the end of a file, making it and its parents. Not all or nothing."""
        content = encode_option("data", data)
        await self._desk.run(Rooted.append, await self._resolved(path), content)

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`. A symlink that leads nowhere is not found, unless not followed."""
        where = await self._resolved(path)
        return await self._desk.run(Rooted.info, where, follow_symlinks=follow_symlinks)

    async def readdir(self, path: str) -> list[str]:
        """The names in a directory, dotfiles too, sorted; non-UTF-8 bytes as `\\xNN`."""
        return await self._desk.run(Rooted.names, await self._resolved(path))

    async def list_files(
        self, path: str, *, recursive: bool = False, hidden: bool = False
    ) -> list[FileInfo]:
        """What is in a directory, or below it, sorted by path; symlinks as themselves."""
        where = await self._resolved(path)
        return await self._desk.run(
            operations.list_files, where, recursive=recursive, hidden=hidden
        )

    async def exists(self, path: str) -> bool:
        """Whether `path` leads to something."""
        return await self._desk.run(Rooted.exists, await self._resolved(path))

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory; `recursive` makes parents and accepts one that is there."""
        where = await self._resolved(path)
        await self._desk.run(Rooted.make_directory, where, recursive=recursive)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory. Never the root."""
        where = await self._resolved(path)
        await self._desk.run(Rooted.remove, where, recursive=recursive, force=force)

    async def rename(self, source: str, target: str) -> None:
        """Give a file or directory another path, replacing a file or an empty directory."""
        old, new = await self._resolved(source), await self._resolved(target)
        await self._desk.run(operations.rename, old, new)

    async def move(self, source: str, target: str) -> str:
        """As `rename`, but into a directory that is there, as mv does. Returns where it is."""
        old, new = await self._resolved(source), await self._resolved(target)
        return await self._desk.run(operations.move, old, new)

    async def copy(self, source: str, target: str, *, recursive: bool = False) -> None:
        """Copy a file, or with `recursive` a directory, with modes; links in it stay links."""
        old, new = await self._resolved(source), await self._resolved(target)
        await self._desk.run(operations.copy, old, new, recursive=recursive)

    async def symlink(self, target: str, path: str) -> None:
        """Make a symlink at `path` that leads to `target`, which is kept as it is written."""
        await self._desk.run(Rooted.symlink, check_path(target), await self._resolved(path))

    async def readlink(self, path: str) -> str:
        """Where the symlink at `path` leads."""
        return await self._desk.run(Rooted.readlink, await self._resolved(path))

    async def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits of what a path leads to."""
        if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
            raise InvalidOption(
                f"mode is a number from 0 to 0o7777, not {mode!r}.",
                hint="Pass for example mode=0o755.",
                option="mode",
                value=mode,
            )
        await self._desk.run(Rooted.chmod, await self._resolved(path), mode)

    async def chown(self, path: str, uid: int, gid: int | None = None) -> None:
        """Give a file to a user of the sandbox, and to a group (by default of that number)."""
        uid = _count("uid", uid)
        gid = uid if gid is None else _count("gid", gid)
        await self._desk.run(Rooted.chown, await self._resolved(path), uid, gid)

    async def touch(self, path: str, *, mtime: float | None = None) -> None:
        """Set the time of the last change, by default to this moment, making the file."""
        if mtime is not None and not abs(mtime) < MOST_SECONDS:
            raise InvalidOption(
                f"mtime is seconds since 1970, not {mtime!r}.",
                hint="Pass for example time.time().",
                option="mtime",
                value=mtime,
            )
        await self._desk.run(Rooted.touch, await self._resolved(path), mtime)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Absolute paths that match, sorted. See `SandboxApi.glob`."""
        start = await self._resolved(cwd or ".")
        return await self._desk.run(
            operations.glob, pattern, start, hidden=hidden, files_only=files_only
        )

    async def disk_usage(self, path: str = "/") -> DiskUsage:
        """What a file, or a directory with all that is below it, takes of the disk."""
        return await self._desk.run(operations.disk_usage, await self._resolved(path))

    async def upload_tar(
        self,
        path: str,
        stream: AsyncIterable[bytes],
        *,
        keep_owner: bool = False,
        max_bytes: int | None = None,
    ) -> Extracted:
        """Unpack a tar archive, gzipped or not, into a directory, which is made if need be.

        Nothing is written outside of the directory. A failure says in its fields `member`,
        `files` and `bytes` how far it came; what was unpacked until then stays.
        """
        where = await self._resolved(path)
        result = Extracted()
        steps = await self._desk.open(
            extract, where, result, keep_owner=keep_owner, max_bytes=max_bytes
        )
        try:
            await steps.next()
            async for chunk in stream:
                await steps.send(encode_option("stream", chunk))
            await steps.send(b"")
        finally:
            await steps.aclose()
        return result

    async def download_tar(
        self, path: str, *, compress: bool = False, exclude: Sequence[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """A directory, or a file, as a tar archive of any size, piece by piece.

        Names are relative to the directory. What is neither a file, a directory nor a
        symlink is left out, as is what `exclude` matches.
        """
        steps = await self._desk.open(
            pack, await self._resolved(path), compress=compress, exclude=tuple(exclude)
        )
        try:
            while (chunk := await steps.next()) is not None:
                yield chunk
        finally:
            await steps.aclose()

    async def watch(
        self,
        path: str,
        *,
        recursive: bool = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] = EXCLUDED,
        cursor: str | None = None,
    ) -> WatchStream:
        """What changes at a path from here on, or since `cursor`, as an async iterator.

        It is live when this returns. See `WatchStream`.
        """
        return await self._watches.start(
            await self._resolved(path),
            recursive=recursive,
            include=tuple(include),
            exclude=tuple(exclude),
            cursor=cursor,
        )

    async def _resolved(self, path: str) -> str:
        """The absolute form of `path`, once it is known where relative ones start."""
        where = self.resolve_path(path)
        if self._cwd_known or path.startswith("/"):
            return where
        # The image of a sandbox may say, and is not looked at before its first run.
        await self._root()
        self._cwd_known = True
        return self.resolve_path(path)

    async def release(self) -> None:
        """End every stream, watch and call, so that nothing holds the sandbox's root.

        For when the sandbox stops; calls after it ask for the root again.
        """
        await self._watches.release()
        await self._desk.release()


def _count(option: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_OFFSET:
        raise InvalidOption(
            f"{option} is a number of at least 0, not {value!r}.",
            hint=f"Pass for example {option}=0.",
            option=option,
            value=value,
        )
    return value
