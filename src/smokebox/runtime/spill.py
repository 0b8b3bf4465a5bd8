"""Files for output that is too large for memory: private, bounded, removed with their sandbox."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from io import FileIO

MAX_SPILL_FILES = 64
MAX_SPILL_BYTES = 1 << 30


class SpillFolder:
    """A private folder for output streams. Safe to use from several threads.

    It is created with the first file, in `parent` or the system's temporary directory, and removed
    by `close` or with the last reference. When there are too many files or bytes in it, the oldest
    finished files are removed. A sandbox that has `parent` mounted at another path passes that as
    `shown_parent`; its users may then read the files.
    """

    def __init__(
        self,
        *,
        parent: str | None = None,
        shown_parent: str | None = None,
        max_files: int = MAX_SPILL_FILES,
        max_bytes: int = MAX_SPILL_BYTES,
    ) -> None:
        self._parent = parent
        self._shown_parent = shown_parent
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._path: str | None = None
        self._spills: list[Spill] = []
        self._remove: weakref.finalize[[str, int], SpillFolder] | None = None

    def open(self) -> Spill:
        """Create a file, or raise OSError."""
        with self._lock:
            if self._path is None:
                self._path = tempfile.mkdtemp(prefix="smokebox-output-", dir=self._parent)
                self._remove = weakref.finalize(self, _remove, self._path, os.getpid())
            fd, path = tempfile.mkstemp(dir=self._path, prefix="stream-", suffix=".txt")
            shown_path = path
            if self._shown_parent is not None:
                os.chmod(self._path, 0o755)
                os.fchmod(fd, 0o644)
                folder = os.path.basename(self._path)
                shown_path = os.path.join(self._shown_parent, folder, os.path.basename(path))
            spill = Spill(self, path, shown_path, FileIO(fd, "w"))
            self._spills.append(spill)
            self._evict(keep=spill)
            return spill

    def reserve(self, spill: Spill, count: int) -> bool:
        """Remove older files so that `spill` can grow by `count` bytes; False if it cannot."""
        with self._lock:
            spill.size += count
            self._evict(keep=spill)
            return sum(each.size for each in self._spills) <= self._max_bytes

    def discard(self, spill: Spill) -> None:
        """Remove one file."""
        with self._lock:
            self._drop(spill)

    def close(self) -> None:
        """Remove the folder. Safe to repeat."""
        with self._lock:
            for spill in list(self._spills):
                self._drop(spill)
            if self._remove is not None:
                self._remove()
            self._path = None

    def _evict(self, *, keep: Spill) -> None:
        for spill in list(self._spills):
            total = sum(each.size for each in self._spills)
            if len(self._spills) <= self._max_files and total <= self._max_bytes:
                return
            if spill.finished and spill is not keep:
                self._drop(spill)

    def _drop(self, spill: Spill) -> None:
        with contextlib.suppress(OSError):
            os.unlink(spill.path)
        spill.close()
        if spill in self._spills:
            self._spills.remove(spill)


class Spill:
    """The file of one stream. One thread writes it, any may close it."""

    def __init__(self, folder: SpillFolder, path: str, shown_path: str, file: FileIO) -> None:
        self.path = path
        self.shown_path = shown_path
        self.size = 0
        self.finished = False
        self._folder = folder
        self._file = file
        self._lock = threading.Lock()
        self._closed = False

    def write(self, data: list[bytes]) -> bool:
        """Write all of `data`; False if it does not fit, and then the file is removed."""
        with self._lock:
            written = not self._closed and self._write(data)
            if not written:
                self._folder.discard(self)
        self._close_if_unused()
        return written

    def finish(self) -> None:
        """Close the file of a complete stream."""
        with self._lock:
            self._file.close()
            self.finished = True

    def close(self) -> None:
        """Close the file. Never waits for a write in progress, which closes it instead."""
        self._closed = True
        self._close_if_unused()

    def _write(self, data: list[bytes]) -> bool:
        try:
            for piece in data:
                if not self._folder.reserve(self, len(piece)):
                    return False
                view = memoryview(piece)
                while view:
                    view = view[self._file.write(view) :]
        except OSError:
            return False
        return True

    def _close_if_unused(self) -> None:
        # Closing it during a write could send the bytes to another file with the same number.
        if self._closed and self._lock.acquire(blocking=False):
            try:
                self._file.close()
            finally:
                self._lock.release()


def _remove(path: str, pid: int) -> None:
    # A forked copy of the process must not remove the folder of the original.
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
