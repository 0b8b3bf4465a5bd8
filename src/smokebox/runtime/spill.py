"""Files for output that is too long for memory: private, bounded, and gone with their sandbox."""

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
    """A private folder for streams that are too long for memory. Safe from several threads.

    Made with the first file, in `parent` or among the system's temporary files, and removed
    by `close`, or with the last reference. When there are too many files or bytes in it the
    oldest finished ones go. A sandbox that sees `parent` at another path says so by
    `seen_at`; its own users may read then.
    """

    def __init__(
        self,
        *,
        parent: str | None = None,
        seen_at: str | None = None,
        max_files: int = MAX_SPILL_FILES,
        max_bytes: int = MAX_SPILL_BYTES,
    ) -> None:
        self._parent = parent
        self._seen_at = seen_at
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._path: str | None = None
        self._spills: list[Spill] = []
        self._remove: weakref.finalize[[str, int], SpillFolder] | None = None

    def open(self) -> Spill:
        """Begin a file, or raise OSError."""
        with self._lock:
            if self._path is None:
                self._path = tempfile.mkdtemp(prefix="smokebox-output-", dir=self._parent)
                self._remove = weakref.finalize(self, _remove, self._path, os.getpid())
            fd, path = tempfile.mkstemp(dir=self._path, prefix="stream-", suffix=".txt")
            shown = path
            if self._seen_at is not None:
                os.chmod(self._path, 0o755)
                os.fchmod(fd, 0o644)
                folder = os.path.basename(self._path)
                shown = os.path.join(self._seen_at, folder, os.path.basename(path))
            spill = Spill(self, path, shown, FileIO(fd, "w"))
            self._spills.append(spill)
            self._evict(keep=spill)
            return spill

    def claim(self, spill: Spill, count: int) -> bool:
        """Whether `spill` may grow by `count` bytes, once older ones have made room."""
        with self._lock:
            spill.size += count
            self._evict(keep=spill)
            return sum(each.size for each in self._spills) <= self._max_bytes

    def discard(self, spill: Spill) -> None:
        """Remove one file."""
        with self._lock:
            self._drop(spill)

    def close(self) -> None:
        """Remove everything. Safe to repeat."""
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
        spill.drop()
        if spill in self._spills:
            self._spills.remove(spill)


class Spill:
    """One stream on its way to disk. One thread writes, any may drop it."""

    def __init__(self, folder: SpillFolder, path: str, shown: str, file: FileIO) -> None:
        self.path = path
        self.shown = shown
        self.size = 0
        self.finished = False
        self._folder = folder
        self._file = file
        self._busy = threading.Lock()
        self._dropped = False

    def write(self, data: list[bytes]) -> bool:
        """Whether all of `data` is kept; when not, the file is gone."""
        with self._busy:
            kept = not self._dropped and self._write(data)
            if not kept:
                self._folder.discard(self)
        self._close_if_dropped()
        return kept

    def finish(self) -> None:
        """No more will come."""
        with self._busy:
            self._file.close()
            self.finished = True

    def drop(self) -> None:
        """No more is wanted. Never waits for a write that is under way."""
        self._dropped = True
        self._close_if_dropped()

    def _write(self, data: list[bytes]) -> bool:
        try:
            for piece in data:
                if not self._folder.claim(self, len(piece)):
                    return False
                view = memoryview(piece)
                while view:
                    view = view[self._file.write(view) :]
        except OSError:
            return False
        return True

    def _close_if_dropped(self) -> None:
        # To close it under a write could send the bytes to whatever gets its number next.
        if self._dropped and self._busy.acquire(blocking=False):
            try:
                self._file.close()
            finally:
                self._busy.release()


def _remove(path: str, pid: int) -> None:
    # A forked copy of the process must not remove what is the original's.
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
