"""The files of a sandbox: read, written, listed, changed, watched."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from smokebox.client.handle import Handle
from smokebox.client.watching import Watch
from smokebox.errors import InvalidOption
from smokebox.sandbox.paths import check_path
from smokebox.sandbox.text import decode_file, encode_option
from smokebox.types import DiskUsage, Extracted, FileInfo
from smokebox.wire import answers, requests

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Sequence


class Files(Handle):
    """Files by path; a relative one starts at `cwd`. See `SandboxApi` for the first of these."""

    async def read_file(self, path: str) -> str:
        """The text of a file. Raises `NotText` where it is not UTF-8."""
        data = await self.read_bytes(path)
        return decode_file(self.resolve_path(path), data)

    async def read_bytes(self, path: str) -> bytes:
        """The bytes of a file."""
        return b"".join([piece async for piece in self.read_stream(path)])

    async def read_stream(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """A file of any size, or a part of one, piece by piece."""
        query, headers = {"path": check_path(path)}, _range(offset, length)
        if length == 0:
            return
        async with contextlib.aclosing(self._bytes("/files", query=query, headers=headers)) as data:
            try:
                async for piece in data:
                    yield piece
            except InvalidOption as error:
                # A part that begins beyond the end of the file: there is nothing of it.
                if not headers or error.fields.get("option") != "range":
                    raise

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Make or replace a file, and its parent directories. All or nothing."""
        content, query = encode_option("data", data), {"path": check_path(path)}
        await self._upload(answers.Written, "PUT", "/files", content, query=query)

    async def write_stream(self, path: str, chunks: AsyncIterable[bytes]) -> int:
        """As `write_file`, from bytes of any amount as they come. Returns how many."""
        query = {"path": check_path(path)}
        return (await self._upload(answers.Written, "PUT", "/files", chunks, query=query)).bytes

    async def append_file(self, path: str, data: str | bytes) -> None:
        """Add to the end of a file, making it and its parents. Not all or nothing."""
        content, query = encode_option("data", data), {"path": check_path(path), "append": True}
        await self._upload(answers.Written, "PUT", "/files", content, query=query, repeatable=False)

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`. A symlink that leads nowhere is not found, unless not followed."""
        query = {"path": check_path(path), "follow_symlinks": follow_symlinks}
        return await self._ask(FileInfo, "GET", "/files/stat", query=query)

    async def readdir(self, path: str) -> list[str]:
        """The names in a directory, dotfiles too, sorted; non-UTF-8 bytes as `\\xNN`."""
        query = {"path": check_path(path)}
        return (await self._ask(answers.Names, "GET", "/files/names", query=query)).names

    async def list_files(
        self, path: str, *, recursive: bool = False, hidden: bool = False
    ) -> list[FileInfo]:
        """What is in a directory, or below it, sorted by path; symlinks as themselves."""
        query = {"path": check_path(path), "recursive": recursive, "hidden": hidden}
        found = await self._ask(answers.FileList, "GET", "/files/list", query=query, timeout=None)
        return found.files

    async def exists(self, path: str) -> bool:
        """Whether `path` leads to something."""
        query = {"path": check_path(path)}
        return (await self._ask(answers.Exists, "GET", "/files/exists", query=query)).exists

    async def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory; `recursive` makes parents and accepts one that is there."""
        body = requests.MakeDirectory(path=check_path(path), recursive=recursive)
        await self._ask(type(None), "POST", "/files/mkdir", body=body)

    async def rm(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory. Never the root."""
        query = {"path": check_path(path), "recursive": recursive, "force": force}
        await self._ask(type(None), "DELETE", "/files", query=query, timeout=None)

    async def rename(self, source: str, target: str) -> None:
        """Give a file or directory another path, replacing a file or an empty directory."""
        body = requests.Rename(source=check_path(source), target=check_path(target))
        await self._ask(type(None), "POST", "/files/rename", body=body, timeout=None)

    async def move(self, source: str, target: str) -> str:
        """As `rename`, but into a directory that is there, as mv does. Returns where it is."""
        body = requests.Rename(source=check_path(source), target=check_path(target))
        moved = await self._ask(answers.PathAnswer, "POST", "/files/move", body=body, timeout=None)
        return moved.path

    async def copy(self, source: str, target: str, *, recursive: bool = False) -> None:
        """Copy a file, or with `recursive` a directory, with modes; links in it stay links."""
        body = requests.Transfer(
            source=check_path(source), target=check_path(target), recursive=recursive
        )
        await self._ask(type(None), "POST", "/files/copy", body=body, timeout=None)

    async def symlink(self, target: str, path: str) -> None:
        """Make a symlink at `path` that leads to `target`, which is kept as it is written."""
        body = requests.Symlink(target=check_path(target), path=check_path(path))
        await self._ask(type(None), "POST", "/files/symlink", body=body)

    async def readlink(self, path: str) -> str:
        """Where the symlink at `path` leads."""
        query = {"path": check_path(path)}
        return (await self._ask(answers.PathAnswer, "GET", "/files/readlink", query=query)).path

    async def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits of what a path leads to."""
        body = requests.SetMode(path=check_path(path), mode=mode)
        await self._ask(type(None), "POST", "/files/chmod", body=body)

    async def chown(self, path: str, uid: int, gid: int | None = None) -> None:
        """Give a file to a user of the sandbox, and to a group (by default of that number)."""
        body = requests.SetOwner(path=check_path(path), uid=uid, gid=gid)
        await self._ask(type(None), "POST", "/files/chown", body=body)

    async def touch(self, path: str, *, mtime: float | None = None) -> None:
        """Set the time of the last change, by default to this moment, making the file."""
        body = requests.Touch(path=check_path(path), mtime=mtime)
        await self._ask(type(None), "POST", "/files/touch", body=body)

    async def glob(
        self,
        pattern: str,
        *,
        cwd: str | None = None,
        hidden: bool = False,
        files_only: bool = False,
    ) -> list[str]:
        """Absolute paths that match, sorted. See `SandboxApi.glob`."""
        query = {
            "pattern": check_path(pattern),
            "cwd": None if cwd is None else check_path(cwd),
            "hidden": hidden,
            "files_only": files_only,
        }
        found = await self._ask(answers.Paths, "GET", "/files/glob", query=query, timeout=None)
        return found.paths

    async def disk_usage(self, path: str = "/") -> DiskUsage:
        """What a file, or a directory with all that is below it, takes of the disk."""
        query = {"path": check_path(path)}
        return await self._ask(DiskUsage, "GET", "/files/usage", query=query, timeout=None)

    async def upload_tar(
        self, path: str, data: bytes | AsyncIterable[bytes], *, keep_owner: bool = False
    ) -> Extracted:
        """Unpack a tar archive, gzipped or not, into a directory, which is made if need be.

        Nothing is written outside of the directory. A failure says in its fields `member`,
        `files` and `bytes` how far it came; what was unpacked until then stays.
        """
        query = {"path": check_path(path), "keep_owner": keep_owner}
        return await self._upload(Extracted, "PUT", "/archive", data, query=query)

    async def download_tar(
        self, path: str, *, compress: bool = False, exclude: Sequence[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """A directory, or a file, as a tar archive of any size, piece by piece.

        Names are relative to the directory. What is neither a file, a directory nor a
        symlink is left out, as is what `exclude` matches.
        """
        query = {"path": check_path(path), "compress": compress, "exclude": list(exclude)}
        async with contextlib.aclosing(self._bytes("/archive", query=query)) as data:
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
        """What changes at a path from here on, or since `cursor`, as an async iterator.

        It is live when this returns. Without `exclude`, what tools keep for themselves
        (`.git`, `node_modules`, ...) is left out.
        """
        return await Watch.start(
            self,
            check_path(path),
            recursive=recursive,
            include=include,
            exclude=exclude,
            cursor=cursor,
        )


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
