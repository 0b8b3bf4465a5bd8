"""Clean-up of an upper layer before it becomes a layer of an image.

What Smokebox itself puts into a running sandbox is taken out: the files of /etc that it generates,
certificates of the egress proxy, and the places of mounts.
"""

from __future__ import annotations

import contextlib
import os
import stat as stat_bits
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.egress.trust import BUNDLE, BUNDLES, FOR_UPDATES, KEYSTORES, OWN
from smokebox.engine.files.descriptors import LIST, READ, SEARCH, closing, open_beneath
from smokebox.engine.files.trees import lstat, names_in, remove_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GENERATED = ("etc/hosts", "etc/hostname", "etc/resolv.conf")
_MAX_BUNDLE = 16 << 20
_ADDED = ("smokebox.crt", "smokebox.pem")
_DIRECTORY_OF_LINKS = "etc/ssl/certs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """Paths and certificates that Smokebox added to a sandbox, relative to its root."""

    paths: tuple[str, ...] = ()
    authority: bytes = b""


def clean_upper(
    directory: str,
    additions: Additions,
    read_below: Callable[[str], bytes | None],
    *,
    generated: bool = True,
) -> bool:
    """Remove additions from an upper layer, and return True if anything is left in it.

    Args:
        directory: The upper directory. Nothing uses it any longer.
        additions: The additions to remove.
        read_below: Returns the content of a file in the layers below, None if it has none.
        generated: Also remove the files of /etc that Smokebox generates.
    """
    top = os.open(directory, LIST | os.O_CLOEXEC)
    try:
        for path in (*(GENERATED if generated else ()), *additions.paths):
            _remove(top, path)
        if additions.authority:
            _remove_authority(top, additions.authority, read_below)
        return bool(names_in(top))
    finally:
        os.close(top)


def _remove_authority(
    top: int, authority: bytes, read_below: Callable[[str], bytes | None]
) -> None:
    for path in (OWN, FOR_UPDATES):
        _remove(top, path.lstrip("/"))
    for path in (BUNDLE, *BUNDLES):
        relative = path.lstrip("/")
        content = _read(top, relative)
        if content is None or authority not in content:
            continue
        before, _, after = content.partition(authority)
        rest = before + after
        below = read_below(path)
        # The newline before it is ours too, if the file had none at its end.
        if rest in (below, (below or b"") + b"\n") or not rest.strip():
            _remove(top, relative)
        else:
            _overwrite(top, relative, rest)
    for path in KEYSTORES:
        _remove(top, path.lstrip("/"), only_if=lambda data: b"smokebox" in data)
    _remove_links(top)


def _remove_links(top: int) -> None:
    """Remove links to the certificate that `update-ca-certificates` made."""
    try:
        folder = open_beneath(top, _DIRECTORY_OF_LINKS, LIST)
    except OSError:
        return
    with closing(folder):
        for _ in range(2):
            for name in names_in(folder):
                with contextlib.suppress(OSError):
                    target = os.readlink(name, dir_fd=folder)
                    if os.path.basename(target) in _ADDED:
                        os.unlink(name, dir_fd=folder)


def _read(top: int, path: str) -> bytes | None:
    try:
        with closing(open_beneath(top, path, READ)) as fd:
            found = os.fstat(fd)
            if not stat_bits.S_ISREG(found.st_mode) or found.st_size > _MAX_BUNDLE:
                return None
            return os.read(fd, found.st_size)
    except OSError:
        return None


def _overwrite(top: int, path: str, data: bytes) -> None:
    with closing(open_beneath(top, path, os.O_WRONLY | os.O_TRUNC)) as fd:
        while data:
            data = data[os.write(fd, data) :]


def _remove(top: int, path: str, *, only_if: Callable[[bytes], bool] | None = None) -> None:
    """Remove a path, and the directories above it that are left empty."""
    folder, _, name = path.rpartition("/")
    try:
        parent = open_beneath(top, folder, SEARCH)
    except OSError:
        return
    with closing(parent):
        found = lstat(parent, name)
        if found is None:
            return
        if only_if is not None and not only_if(_read(top, path) or b""):
            return
        if stat_bits.S_ISDIR(found.st_mode):
            remove_tree(parent, name, path)
        else:
            os.unlink(name, dir_fd=parent)
    remove_empty(top, parents(path))


def parents(path: str) -> list[str]:
    """Return the directories above a path, the nearest first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]


def remove_empty(top: int, paths: Iterable[str]) -> None:
    """Remove directories as far as they are empty and hide nothing below them.

    An empty directory of an upper layer is a copy of the one below it, or was made by us. An
    opaque one hides what is below.
    """
    for path in paths:
        try:
            with closing(open_beneath(top, path, LIST)) as fd:
                if names_in(fd) or "user.overlay.opaque" in os.listxattr(fd):
                    return
            folder, _, name = path.rpartition("/")
            with closing(open_beneath(top, folder, SEARCH)) as parent:
                os.rmdir(name, dir_fd=parent)
        except OSError:
            return
