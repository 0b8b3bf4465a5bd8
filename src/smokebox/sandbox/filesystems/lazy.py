"""Files that are loaded on first read."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING

from smokebox.errors import PathError
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from smokebox.sandbox.virtual.settings import Loader


class LazyFilesystem(Filesystem):
    """Filesystem in which some files have a loader function instead of content.

    They are listed from the start as empty files and get their size on first read. `loop` is the
    event loop that runs `async` loaders; calls come from other threads. `unloaded` maps the files
    that were not read yet to the names of their loaders.
    """

    def __init__(
        self,
        inner: Filesystem,
        loaders: Mapping[str, Loader],
        unloaded: Mapping[str, str],
        *,
        timeout: float,
    ) -> None:
        self.inner = inner
        self.loop: asyncio.AbstractEventLoop | None = None
        self.unloaded = dict(unloaded)
        self._loaders = loaders
        self._timeout = timeout
        self._lock = threading.RLock()
        for path in unloaded:
            inner.makedirs(path.rpartition("/")[0] or "/")
            inner.write(path, b"")

    def read(self, path: str) -> bytes:
        self._load(path)
        return self.inner.read(path)

    def write(self, path: str, data: bytes) -> None:
        self.inner.write(path, data)
        self.unloaded.pop(path, None)

    def append(self, path: str, data: bytes) -> None:
        self._load(path)
        self.inner.append(path, data)

    def lstat(self, path: str) -> Entry:
        return self.inner.lstat(path)

    def peek(self, path: str) -> Entry | None:
        return self.inner.peek(path)

    def listdir(self, path: str) -> Mapping[str, Entry]:
        return self.inner.listdir(path)

    def mkdir(self, path: str) -> None:
        self.inner.mkdir(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self.inner.remove(path, recursive=recursive)
        for lost in self._below(path):
            self.unloaded.pop(lost, None)

    def rename(self, source: str, target: str) -> None:
        self.inner.rename(source, target)
        for replaced in self._below(target):
            self.unloaded.pop(replaced, None)
        for moved in self._below(source):
            self.unloaded[target + moved[len(source) :]] = self.unloaded.pop(moved)

    def symlink(self, target: str, path: str) -> None:
        self.inner.symlink(target, path)

    def readlink(self, path: str) -> str:
        return self.inner.readlink(path)

    def chmod(self, path: str, mode: int) -> None:
        self.inner.chmod(path, mode)

    def touch(self, path: str, mtime: float) -> None:
        self.inner.touch(path, mtime)

    def close(self) -> None:
        self.inner.close()

    def _below(self, path: str) -> list[str]:
        return [one for one in self.unloaded if one == path or one.startswith(path + "/")]

    def _load(self, path: str) -> None:
        if path not in self.unloaded:
            return
        # Only one reader loads; concurrent readers wait for it.
        with self._lock:
            name = self.unloaded.get(path)
            if name is None:
                return
            try:
                content = self._loaders[name]()
                if inspect.isawaitable(content):
                    content = self._await_content(content)
            except Exception as error:
                raise PathError(path, f"{path} could not be loaded: {error!r}") from error
            if not isinstance(content, (str, bytes)):
                raise PathError(path, f"{path} was loaded as {type(content).__name__}, not text")
            self.inner.write(path, content.encode() if isinstance(content, str) else content)
            self.unloaded.pop(path, None)

    def _await_content(self, content: Awaitable[str | bytes]) -> str | bytes:
        async def finish() -> str | bytes:
            return await content

        if self.loop is None or self.loop.is_closed():
            return asyncio.run(asyncio.wait_for(finish(), self._timeout))
        future = asyncio.run_coroutine_threadsafe(finish(), self.loop)
        try:
            return future.result(self._timeout)
        except TimeoutError:
            future.cancel()
            raise
