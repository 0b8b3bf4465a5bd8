"""Files of a sandbox: read, write, copy, archive and watch them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from smokebox.client import transfer
from smokebox.client.watch import Watch
from smokebox.errors import InvalidOption
from smokebox.foundation.paths import check_path
from smokebox.foundation.text import decode_file, encode_option
from smokebox.types import DiskUsage, Extracted, FileInfo
from smokebox.wire import requests, responses

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Sequence

    from smokebox.client.sandbox_connection import SandboxConnection
    from smokebox.client.transfer import Progress


class SandboxFiles:
    """Methods of `Sandbox` about files. A relative path starts at `cwd`."""

    _connection: SandboxConnection

    @property
    def cwd(self) -> str:
        """Absolute directory where relative paths and commands start.

        One that comes from the image or from earlier settings is known after the first call.
        """
        return self._connection.cwd

    def resolve_path(self, path: str) -> str:
        """Return `path` as an absolute path, without looking at any file."""
        return self._connection.resolve_path(path)

    async def read_file(self, path: str) -> str:
        """Return the text of a file.

        Raises:
            PathNotFound: There is no such file.
            PathIsDirectory: It is a directory.
            NotText: It is not UTF-8; read it with `read_bytes`.
        """
        data = await self.read_bytes(path)
        return decode_file(self.resolve_path(path), data)

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            PathNotFound: There is no such file.
            PathIsDirectory: It is a directory.
        """
        return b"".join([piece async for piece in self.read_stream(path)])

    async def read_stream(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield a file of any size, or a part of it, in chunks.

        Args:
            path: File to read.
            offset: First byte; beyond the end nothing is yielded.
            length: Number of bytes, by default up to the end.

        Raises:
            PathNotFound: There is no such file.
            PathIsDirectory: It is a directory.
        """
        query, headers = {"path": check_path(path)}, _range(offset, length)
        if length == 0:
            return
        async with contextlib.aclosing(
            self._connection.download("/files", query=query, headers=headers)
        ) as data:
            try:
                async for piece in data:
                    yield piece
            except InvalidOption as error:
                # A range that starts beyond the end of the file is empty.
                if not headers or error.fields.get("option") != "range":
                    raise

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace a file, and create its parent directories. All or nothing.

        Args:
            path: File to write.
            data: Text, written as UTF-8, or bytes.

        Raises:
            PathIsDirectory: The path is a directory.
        """
        content, query = encode_option("data", data), {"path": check_path(path)}
        await self._connection.request(
            responses.Written, "PUT", "/files", query=query, data=content, timeout=None
        )

    async def write_stream(self, path: str, chunks: AsyncIterable[bytes]) -> int:
        """Create or replace a file from a stream of any size. All or nothing.

        Args:
            path: File to write.
            chunks: Content; if it raises, the file does not change.

        Returns:
            The number of bytes.

        Raises:
            PathIsDirectory: The path is a directory.
        """
        query = {"path": check_path(path)}
        response = await self._connection.request(
            responses.Written, "PUT", "/files", query=query, data=chunks, timeout=None
        )
        return response.bytes

    async def append_file(self, path: str, data: str | bytes) -> None:
        """Append to a file, creating it and its parents. A failure may leave a part.

        Raises:
            PathIsDirectory: The path is a directory.
        """
        content, query = encode_option("data", data), {"path": check_path(path), "append": True}
        await self._connection.request(
            responses.Written, "PUT", "/files", query=query, data=content, retry=False, timeout=None
        )

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the size, mode, type and times of a path.

        Raises:
            PathNotFound: There is nothing, or a dangling symlink that was followed.
        """
        query = {"path": check_path(path), "follow_symlinks": follow_symlinks}
        return await self._connection.request(FileInfo, "GET", "/files/stat", query=query)

    async def readdir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, with dotfiles; non-UTF-8 bytes as `\\xNN`.

        Raises:
            PathNotFound: There is no such directory.
            PathNotDirectory: It is not a directory.
        """
        query = {"path": check_path(path)}
        response = await self._connection.request(
            responses.Names, "GET", "/files/names", query=query
        )
        return response.names

    async def list_files(
        self, path: str, *, recursive: bool = False, hidden: bool = False
    ) -> list[FileInfo]:
        """Return the entries of a directory, or of the whole tree, sorted by path.

        Symlinks are not followed.

        Args:
            path: Directory to list.
            recursive: Include the entries of all directories below it.
            hidden: Include dotfiles.

        Raises:
            PathNotFound: There is no such directory.
            PathNotDirectory: It is not a directory.
        """
        query = {"path": check_path(path), "recursive": recursive, "hidden": hidden}
        response = await self._connection.request(
            responses.FileList, "GET", "/files/list", query=query, timeout=None
        )
        return response.files

    async def exists(self, path: str) -> bool:
        """Return whether a path exists, following symlinks."""
        query = {"path": check_path(path)}
        response = await self._connection.request(
            responses.Exists, "GET", "/files/exists", query=query
        )
        return response.exists

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory.

        Args:
            path: Directory to create.
            recursive: Create parents, and accept an existing directory.

        Raises:
            PathExists: It exists, and `recursive` is not set.
            PathNotFound: Its parent does not exist, and `recursive` is not set.
        """
        body = requests.MakeDirectory(path=check_path(path), recursive=recursive)
        await self._connection.request(type(None), "POST", "/files/mkdir", body=body)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file, a symlink or a directory. The root is never removed.

        Args:
            path: Path to remove; symlinks are not followed.
            recursive: Allow a directory, and remove all of its contents.
            force: Accept a path that does not exist.

        Raises:
            PathNotFound: There is nothing, and `force` is not set.
            PathIsDirectory: It is a directory, and `recursive` is not set.
        """
        query = {"path": check_path(path), "recursive": recursive, "force": force}
        await self._connection.request(type(None), "DELETE", "/files", query=query, timeout=None)

    async def rename(self, source: str, target: str) -> None:
        """Rename a file or directory, replacing a file or an empty directory.

        Raises:
            PathNotFound: There is no such path as `source`.
        """
        body = requests.Rename(source=check_path(source), target=check_path(target))
        await self._connection.request(type(None), "POST", "/files/rename", body=body, timeout=None)

    async def move(self, source: str, target: str) -> str:
        """Move as `mv` does, into `target` if it is a directory; return the new path.

        Raises:
            PathNotFound: There is no such path as `source`.
        """
        body = requests.Rename(source=check_path(source), target=check_path(target))
        response = await self._connection.request(
            responses.PathResponse, "POST", "/files/move", body=body, timeout=None
        )
        return response.path

    async def copy(self, source: str, target: str, *, recursive: bool = False) -> None:
        """Copy a file, or with `recursive` a directory, with modes and symlinks.

        Raises:
            PathNotFound: There is no such path as `source`.
            PathIsDirectory: `source` is a directory, and `recursive` is not set.
        """
        body = requests.Transfer(
            source=check_path(source), target=check_path(target), recursive=recursive
        )
        await self._connection.request(type(None), "POST", "/files/copy", body=body, timeout=None)

    async def symlink(self, target: str, path: str) -> None:
        """Create a symlink at `path` to `target`, which is stored unchanged.

        Raises:
            PathExists: There is something at `path`.
        """
        body = requests.Symlink(target=check_path(target), path=check_path(path))
        await self._connection.request(type(None), "POST", "/files/symlink", body=body)

    async def readlink(self, path: str) -> str:
        """Return the target of a symlink.

        Raises:
            PathNotFound: There is no such path.
        """
        query = {"path": check_path(path)}
        response = await self._connection.request(
            responses.PathResponse, "GET", "/files/readlink", query=query
        )
        return response.path

    async def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits of a file; symlinks are followed.

        Args:
            path: File or directory.
            mode: Bits such as `0o755`.

        Raises:
            PathNotFound: There is no such path.
        """
        body = requests.SetMode(path=check_path(path), mode=mode)
        await self._connection.request(type(None), "POST", "/files/chmod", body=body)

    async def chown(self, path: str, uid: int, gid: int | None = None) -> None:
        """Set the owner and group of a file.

        Args:
            path: File or directory.
            uid: Number of the user inside the sandbox.
            gid: Number of the group, by default the same as `uid`.

        Raises:
            PathNotFound: There is no such path.
        """
        body = requests.SetOwner(path=check_path(path), uid=uid, gid=gid)
        await self._connection.request(type(None), "POST", "/files/chown", body=body)

    async def touch(self, path: str, *, mtime: float | None = None) -> None:
        """Set the modification time of a file, creating it if needed.

        Args:
            path: File or directory.
            mtime: Seconds since the epoch, by default now.
        """
        body = requests.Touch(path=check_path(path), mtime=mtime)
        await self._connection.request(type(None), "POST", "/files/touch", body=body)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Return the sorted absolute paths that match a pattern.

        `**` crosses directories but not symlinks to them; `*`, `?` and `[...]` stay within a
        name.

        Args:
            pattern: Pattern, relative to `cwd` or absolute.
            cwd: Directory to start in, by default the sandbox's.
            hidden: Match dotfiles too; otherwise only where the pattern has the dot.
            files_only: Leave out directories.
        """
        query = {
            "pattern": check_path(pattern),
            "cwd": None if cwd is None else check_path(cwd),
            "hidden": hidden,
            "files_only": files_only,
        }
        response = await self._connection.request(
            responses.Paths, "GET", "/files/glob", query=query, timeout=None
        )
        return response.paths

    async def disk_usage(self, path: str = "/") -> DiskUsage:
        """Return the disk space that a file or a directory tree takes.

        Raises:
            PathNotFound: There is no such path.
        """
        query = {"path": check_path(path)}
        return await self._connection.request(
            DiskUsage, "GET", "/files/usage", query=query, timeout=None
        )

    async def upload_tar(
        self, path: str, data: bytes | AsyncIterable[bytes], *, keep_owner: bool = False
    ) -> Extracted:
        """Unpack a tar archive, gzipped or not, into a directory, creating it if needed.

        Nothing is written outside of the directory. The fields `member`, `files` and `bytes`
        of an error say how far it came; what was unpacked until then stays.

        Args:
            path: Directory to unpack into.
            data: The archive.
            keep_owner: Set the owners of the archive; otherwise root owns all.
        """
        query = {"path": check_path(path), "keep_owner": keep_owner}
        return await self._connection.request(
            Extracted, "PUT", "/archive", query=query, data=data, timeout=None
        )

    async def download_tar(
        self, path: str, *, compress: bool = False, exclude: Sequence[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yield a directory, or a file, as a tar archive in pieces.

        Names are relative to the directory. Leaves out what is neither a file, a directory nor
        a symlink.

        Args:
            path: Directory or file.
            compress: Compress with gzip.
            exclude: Patterns of paths to leave out.

        Raises:
            PathNotFound: There is no such path.
        """
        query = {"path": check_path(path), "compress": compress, "exclude": list(exclude)}
        async with contextlib.aclosing(self._connection.download("/archive", query=query)) as data:
            async for piece in data:
                yield piece

    async def watch(
        self,
        path: str,
        *,
        recursive: bool = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] | None = None,
        cursor: str | None = None,
    ) -> Watch:
        """Watch a path for changes. The watch is active when this returns.

        Args:
            path: File or directory.
            recursive: Watch the whole tree.
            include: Patterns of paths to report, by default all.
            exclude: Patterns of paths to leave out, by default `.git`, `node_modules` and
                other directories of tools.
            cursor: Continue after an earlier watch: its `Watch.cursor`.
        """
        query = {
            "path": check_path(path),
            "recursive": recursive,
            "include": list(include),
            # A query cannot hold an empty list: one empty name stands for it.
            "exclude": None if exclude is None else list(exclude) or "",
            "cursor": cursor,
        }
        watch = Watch(self._connection.resumed_events("/watch", query))
        await watch._start()
        return watch

    async def upload(
        self,
        local: str | os.PathLike[str],
        remote: str,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file, or a directory with its contents, into the sandbox.

        Args:
            local: Path on this machine.
            remote: Path in the sandbox. A file replaces it, or goes below it if it ends with
                a slash; the contents of a directory go below it, with modes and symlinks.
            progress: Called with the bytes copied so far and the total, None if unknown.
        """
        await transfer.upload(self, os.fspath(local), remote, progress)

    async def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file, or a directory with its contents, out of the sandbox.

        Nothing is written outside of `local`; links that lead out of it are refused.

        Args:
            remote: Path in the sandbox.
            local: Path on this machine. A file replaces it, all or nothing, or goes into it
                if it is a directory; the contents of a directory go below it once all arrived.
            progress: Called with the bytes copied so far and the total, None if unknown.
        """
        await transfer.download(self, remote, os.fspath(local), progress)


def _range(offset: int, length: int | None) -> dict[str, str]:
    for option, value in (("offset", offset), ("length", length)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise InvalidOption(
                f"{option} is a number of at least 0, not {value!r}.",
                hint=f"Pass for example {option}=0.",
                option=option,
                value=value,
            )
    if not offset and length is None:
        return {}
    return {"range": f"bytes={offset}-{'' if length is None else offset + length - 1}"}
