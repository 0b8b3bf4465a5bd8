"""The images `dir:NAME`: root file systems in directories that the operator named."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from typing import TYPE_CHECKING

from smokebox.engine.images.frame import make_frame
from smokebox.engine.images.host_image import default_env
from smokebox.engine.images.image import Image, ImageConfig, Layer
from smokebox.errors import InvalidOption, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from smokebox.engine.images.layer_store import LayerStore

PREFIX = "dir:"
GRANT = "[images] of server.toml, or directories= of Host.open()"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

# Every root file system has one of these.
_EXPECTED = ("usr", "bin", "etc", "lib")


class DirectoryImages:
    """Images that are directories, made for example by debootstrap or `docker export`.

    A directory is used in place and never written; do not change it while a sandbox uses it.
    Directories that a sandbox needs, such as /proc and /workspace, are in a layer below it.
    Clients see the names of images, and nothing of the directories.

    Args:
        layer_store: Store of the layers that are added to a directory.
        directories: Absolute paths of directories by image name.
        private: Directories of Smokebox. No image may be, contain or lie inside one.

    Raises:
        InvalidOption: A name or directory is not valid. A missing directory is no error yet.
    """

    def __init__(
        self,
        layer_store: LayerStore,
        directories: Mapping[str, str] | None = None,
        private: Iterable[str] = (),
    ) -> None:
        self._layer_store = layer_store
        self._directories = dict(directories or {})
        self._private = [*private, layer_store.directory]
        for name, path in self._directories.items():
            _check_setting(name, path)
            if self._is_private(path):
                raise _invalid_setting(
                    name,
                    path,
                    "is, contains or lies inside the state directory or the layers of Smokebox",
                    "Move the root file system elsewhere.",
                )

    async def get(self, name: str, *, scope: str | None = None) -> Image:
        """Return the image of a name such as `dir:bookworm`."""
        path = await asyncio.to_thread(self._find, name)
        frame = await make_frame(self._layer_store)
        layers = (frame.over, Layer(path=path), frame.under)
        return Image(
            name=name,
            digest=_digest(frame.digest, path),
            layers=layers,
            config=ImageConfig(env=default_env(path)),
        )

    def _find(self, image: str) -> str:
        """Return the directory of an image. Errors do not tell where it is."""
        name = image.removeprefix(PREFIX)
        if not _NAME.fullmatch(name):
            raise InvalidOption(
                f"the image {image!r} is not the name of a directory.",
                hint=f"The operator names the directory in {GRANT}; then use 'dir:NAME'.",
                option="image",
                value=image,
            )
        path = self._directories.get(name)
        if path is None:
            raise NotFound(
                f"the store has no image {image!r}.",
                hint=f"The operator adds it in {GRANT}.",
                kind="image",
                name=image,
            )
        real = os.path.realpath(path)
        # Again, because a symlink may lead elsewhere since the host was opened.
        if not any(os.path.isdir(os.path.join(real, part)) for part in _EXPECTED) or (
            self._is_private(real)
        ):
            raise NotFound(
                f"the directory of the image {image!r} is not a root file system.",
                hint=f"The operator corrects it in {GRANT}: it must have one of "
                f"{', '.join(_EXPECTED)}.",
                kind="image",
                name=image,
            )
        return real

    def _is_private(self, path: str) -> bool:
        real = os.path.realpath(path)
        private = [os.path.realpath(one) for one in self._private]
        return any(os.path.commonpath([real, one]) in (real, one) for one in private)


def _check_setting(name: object, path: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid_setting(
            name,
            path,
            "has no valid name",
            "Use at most 63 letters, digits, '.', '_' and '-', a letter or digit first.",
        )
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path:
        raise _invalid_setting(
            name, path, "is not an absolute path", "Write for example '/srv/bookworm'."
        )


def _digest(frame: str, path: str) -> str:
    """Hash the path and the status of the top directories; the tree is too large to read."""
    digest = hashlib.sha256(f"{frame} {path}".encode(errors="surrogateescape"))
    for directory in (path, os.path.join(path, "etc"), os.path.join(path, "usr")):
        if os.path.isdir(directory):
            found = os.stat(directory)
            digest.update(f"\0{found.st_dev} {found.st_ino} {found.st_mtime_ns}".encode())
    return digest.hexdigest()


def _invalid_setting(name: object, path: object, problem: str, hint: str) -> InvalidOption:
    return InvalidOption(
        f"the directory {path!r} of the image {name!r} {problem}.",
        hint=hint,
        option="directories",
        value=path,
    )
