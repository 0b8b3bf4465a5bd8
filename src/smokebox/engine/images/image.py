"""Images, which are read-only layers with a configuration, and the store of layers by digest."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.errors import from_os_error
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable


_UNFINISHED = ".making-"
_ABANDONED_AFTER = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A read-only directory of the host, seen at `target`.

    Layers of one target are stacked, the uppermost first, with the upper layer of the sandbox on
    top. `target` is `/`, or a directory in a layer of `/`.
    """

    path: str
    target: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A stack of layers plus a configuration. `digest` changes whenever one of them does."""

    name: str
    digest: str
    layers: tuple[Layer, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/workspace"
    user: str = "root"


class LayerStore:
    """Directories by digest, which are never changed once they are complete."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)

    def find(self, digest: str) -> str | None:
        """Return the directory of a digest, if it exists."""
        path = os.path.join(self.directory, digest)
        return path if os.path.isdir(path) else None

    def ensure(self, digest: str, make: Callable[[str], None]) -> str:
        """Return the directory of a digest, filled by `make` if it does not exist.

        If two engines make the same one concurrently, both get the one that was finished first.
        """
        try:
            return self.find(digest) or self._add(digest, make)
        except OSError as error:
            raise from_os_error(error, str(error.filename or self.directory)) from error

    def _add(self, digest: str, make: Callable[[str], None]) -> str:
        os.makedirs(self.directory, exist_ok=True)
        self._sweep()
        unfinished = os.path.join(self.directory, _UNFINISHED + new_id())
        path = os.path.join(self.directory, digest)
        make_directory(unfinished)
        try:
            make(unfinished)
            os.rename(unfinished, path)
        except OSError:
            # Fine if another engine was faster.
            if not os.path.isdir(path):
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return path

    def _sweep(self) -> None:
        """Remove incomplete directories of killed engines."""
        with os.scandir(self.directory) as entries:
            unfinished = [entry.path for entry in entries if entry.name.startswith(_UNFINISHED)]
        for path in unfinished:
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(path, ignore_errors=True)


def make_directory(path: str, mode: int = 0o755) -> None:
    """Create a directory of exactly that mode, independent of the umask."""
    os.mkdir(path)
    os.chmod(path, mode)


def make_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Create a file of exactly that mode, independent of the umask."""
    with open(path, "xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
