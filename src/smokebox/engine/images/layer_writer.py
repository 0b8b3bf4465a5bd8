"""Writing the entries of a layer into its directory, by descriptors and never through symlinks.

With `keep_owners` the entries get the ids that they name. Without, all belong to this user, and
the owners are recorded in extended attributes, or in `owners` for files that can have none.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat as stat_bits
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import LIST, READ, SEARCH, closing, open_beneath, open_child
from smokebox.engine.files.replacement import copy_content
from smokebox.engine.files.trees import lstat, remove_tree
from smokebox.engine.images.overlay import (
    INTENDED,
    OVERLAY,
    LowerEntry,
    LowerView,
    is_opaque,
    is_whiteout,
    make_whiteout,
    set_opaque,
    xattrs_of,
)
from smokebox.engine.workers import checkpoint
from smokebox.errors import ImageError, LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OWNER, MODE = f"{INTENDED}owner", f"{INTENDED}mode"
CAPABILITY = "security.capability"
MAX_ID = 0xFFFF

# What an entry takes on the disk besides its content, and what contents are rounded up to.
_ENTRY, _BLOCK = 512, 4096
_ZEROS = bytes(1 << 20)
_WRITE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Attributes of an entry. `mode` has the permission bits only."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: dict[str, bytes] = field(default_factory=dict)


def unsafe(reason: str) -> ImageError:
    """Return the error for a layer that no honest tool makes."""
    return ImageError(
        f"a layer of the image is unsafe: {reason}.",
        hint="Build the image again; do not use it if you do not trust its maker.",
        reason="unsafe",
    )


class LayerWriter:
    """Writes entries below the open directory `top`, which is of the store and private.

    `view` returns the layers below. `files` counts entries, and `bytes` their content.
    """

    def __init__(
        self,
        top: int,
        *,
        keep_owners: bool,
        max_bytes: int,
        max_files: int,
        view: Callable[[], LowerView],
        charge: Callable[[int], None] | None = None,
    ) -> None:
        self.owners: dict[str, tuple[int, int]] = {}
        self.files = 0
        self.bytes = 0
        self._top = top
        self._keep_owners = keep_owners
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._view = view
        self._charge = charge
        self._times: dict[str, int] = {}
        self._opaque_top = False
        self._whiteouts: set[str] = set()
        # Directories that have no entry of their own.
        self._implied: set[str] = set()
        # The directory of the last entry, which is often that of the next one too.
        self._last_folder: tuple[str, int] | None = None

    def close(self) -> None:
        """Close the descriptors. Safe to repeat."""
        last, self._last_folder = self._last_folder, None
        if last is not None:
            os.close(last[1])

    def finish(self) -> None:
        """Complete what depends on the layers below, and set the times of directories."""
        for path in sorted(self._implied):
            self._complete(path)
        if self._opaque_top:
            self._hide_all()
        for path in sorted(self._whiteouts):
            self._drop_useless(path)
        self.close()
        for path, mtime_ns in reversed(self._times.items()):
            checkpoint()
            # It may have been replaced.
            with contextlib.suppress(OSError), closing(open_beneath(self._top, path, LIST)) as fd:
                os.utime(fd, ns=(mtime_ns, mtime_ns))

    def directory(self, path: str, metadata: Metadata) -> None:
        """Make a directory, or change the metadata of one that the layer has. "" is its root."""
        self._count()
        if path:
            folder, name = self._place(path)
            found = lstat(folder, name)
            if found is None or not stat_bits.S_ISDIR(found.st_mode):
                self._clear(path, folder, name)
                os.mkdir(name, 0o700, dir_fd=folder)
            with closing(open_child(folder, name, LIST)) as fd:
                if found is not None and is_whiteout(found):
                    set_opaque(fd)
                self._set_metadata(fd, metadata, needed=0o700)
        else:
            self._set_metadata(self._top, metadata, needed=0o700)
        self._implied.discard(path)
        self._times.pop(path, None)
        self._times[path] = metadata.mtime_ns

    def file(self, path: str, metadata: Metadata, size: int, content: Iterator[bytes]) -> None:
        """Write a file of a known size."""
        self._count(size)
        folder, name = self._place(path)
        with closing(self._open_new(path, folder, name)) as fd:
            holes = False
            for chunk in content:
                # Saves the disk from files of zeros, which compress to nothing.
                if len(chunk) >= 4096 and chunk == _ZEROS[: len(chunk)]:
                    os.lseek(fd, len(chunk), os.SEEK_CUR)
                    holes = True
                    continue
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            if holes:
                os.ftruncate(fd, size)
            self._set_metadata(fd, metadata, needed=0o400)
            os.utime(fd, ns=(metadata.mtime_ns, metadata.mtime_ns))

    def symlink(self, path: str, metadata: Metadata, target: str) -> None:
        """Make a symlink."""
        self._count()
        folder, name = self._place(path)
        self._clear(path, folder, name)
        os.symlink(target, name, dir_fd=folder)
        self._set_owner_by_name(path, folder, name, metadata)

    def special(self, path: str, metadata: Metadata, kind: int, device: int) -> None:
        """Make a pipe or a device. A device that may not be made is left out."""
        self._count()
        folder, name = self._place(path)
        if kind == stat_bits.S_IFCHR and device == 0:
            raise unsafe(f"{path!r} is a whiteout of the kernel")
        self._clear(path, folder, name)
        try:
            os.mknod(name, kind | 0o600, device, dir_fd=folder)
        except PermissionError:
            # Only root may make devices. Sandboxes have a /dev of ours, and cannot use others.
            return
        self._set_owner_by_name(path, folder, name, metadata)
        os.chmod(name, metadata.mode, dir_fd=folder)

    def hard_link(self, path: str, target: str) -> None:
        """Link to a file of this layer, or copy one of the layers below."""
        self._count()
        folder, name = self._place(path)
        source_folder, source = posixpath.split(target)
        with contextlib.suppress(FileNotFoundError), closing(self._open(source_folder)) as at:
            found = lstat(at, source)
            if found is not None:
                if stat_bits.S_ISDIR(found.st_mode) or is_whiteout(found):
                    raise unsafe(f"{path!r} links to {target!r}, which is no file")
                if target == path:
                    return
                self._clear(path, folder, name)
                os.link(source, name, src_dir_fd=at, dst_dir_fd=folder, follow_symlinks=False)
                if target in self.owners:
                    self.owners[path] = self.owners[target]
                return
        lower = self._view().find(target)
        if lower is None or stat_bits.S_ISDIR(lower.stat.st_mode):
            raise unsafe(f"{path!r} links to {target!r}, which is no file")
        self._copy(path, folder, name, lower)

    def whiteout(self, path: str) -> None:
        """Hide a name of the layers below."""
        self._count()
        folder, name = self._place(path)
        try:
            make_whiteout(folder, name)
            self._whiteouts.add(path)
        except FileExistsError:
            found = lstat(folder, name)
            if found is not None and stat_bits.S_ISDIR(found.st_mode):
                with closing(open_child(folder, name, LIST)) as fd:
                    set_opaque(fd)

    def opaque(self, path: str) -> None:
        """Hide all that the layers below have in a directory."""
        self._count()
        if path:
            set_opaque(self._folder(path))
        else:
            self._opaque_top = True

    def _drop_useless(self, path: str) -> None:
        """Remove a whiteout from a directory that is merged with none below.

        The kernel lists the names in such a directory as they are, and would show it.
        """
        checkpoint()
        parent, name = posixpath.split(path)
        if not parent:
            return
        with contextlib.suppress(OSError), closing(self._open(parent)) as folder:
            found = lstat(folder, name)
            if found is not None and is_whiteout(found) and not self._is_merged(parent):
                os.unlink(name, dir_fd=folder)

    def _is_merged(self, path: str) -> bool:
        at = ""
        for name in path.split("/"):
            at = posixpath.join(at, name)
            with closing(self._open(at)) as fd:
                if is_opaque(fd):
                    return False
        lower = self._view().find(path)
        return lower is not None and stat_bits.S_ISDIR(lower.stat.st_mode)

    def _hide_all(self) -> None:
        # Overlays merge the roots of their layers in any case.
        for name in self._view().names():
            self.whiteout(name)

    def _count(self, size: int = 0) -> None:
        checkpoint()
        self.files += 1
        self.bytes += size
        for count, limit, what in (
            (self.files, self._max_files, "files"),
            (self.bytes, self._max_bytes, "bytes"),
        ):
            if count > limit:
                raise LimitReached(
                    f"a layer of the image has more than {limit} {what}.",
                    hint="Raise the limit of images, or use a smaller image.",
                    limit=f"layer_{what}",
                )

        if self._charge is not None:
            # Files take whole blocks, and all entries a part of one.
            self._charge(-(-size // _BLOCK) * _BLOCK + _ENTRY)

    def _place(self, path: str) -> tuple[int, str]:
        folder, name = posixpath.split(path)
        return self._folder(folder), name

    def _folder(self, path: str) -> int:
        """Return the directory of an entry, created if needed, which stays open until the next."""
        if self._last_folder is None or self._last_folder[0] != path:
            fd = self._open_or_create(path)
            self.close()
            self._last_folder = (path, fd)
        return self._last_folder[1]

    def _open(self, path: str) -> int:
        return open_beneath(self._top, path, SEARCH)

    def _open_or_create(self, path: str) -> int:
        try:
            return self._open(path)
        except OSError:
            fd = os.dup(self._top)
        try:
            at = ""
            for name in path.split("/"):
                at = posixpath.join(at, name)
                self._make_parent(at, fd, name)
                below = open_child(fd, name, SEARCH)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_parent(self, path: str, folder: int, name: str) -> None:
        """Make a missing directory; `finish` completes it.

        The layers below may be unpacked at the same time, and are looked at only then.
        """
        found = lstat(folder, name)
        if found is not None and stat_bits.S_ISDIR(found.st_mode):
            return
        if found is not None and not is_whiteout(found):
            raise unsafe(f"{path!r} is no directory, and has entries")
        self._count()
        self._clear(path, folder, name)
        os.mkdir(name, 0o700, dir_fd=folder)
        with closing(open_child(folder, name, LIST)) as fd:
            os.fchmod(fd, 0o755)
            if found is not None:
                set_opaque(fd)
        (self._implied.add if found is None else self._implied.discard)(path)
        self._times[path] = 0

    def _complete(self, path: str) -> None:
        """Give a directory without an entry the metadata of that below, which it hides."""
        checkpoint()
        try:
            fd = open_beneath(self._top, path, LIST)
        except OSError:
            # It was removed or replaced.
            return
        with closing(fd):
            lower = self._view().find(path)
            if lower is None:
                return
            if stat_bits.S_ISLNK(lower.stat.st_mode):
                raise unsafe(f"{path!r} is a symlink of a layer below, and has entries")
            if stat_bits.S_ISDIR(lower.stat.st_mode):
                with closing(_open_lower(lower, LIST)) as source:
                    _copy_metadata(source, lower.stat, fd, keep_owners=self._keep_owners)
                self._times[path] = lower.stat.st_mtime_ns

    def _copy(self, path: str, folder: int, name: str, lower: LowerEntry) -> None:
        found = lower.stat
        self._count(found.st_size if stat_bits.S_ISREG(found.st_mode) else 0)
        if stat_bits.S_ISREG(found.st_mode):
            with (
                closing(_open_lower(lower, READ)) as source,
                closing(self._open_new(path, folder, name)) as fd,
            ):
                copy_content(source, fd)
                _copy_metadata(source, found, fd, keep_owners=self._keep_owners)
                os.utime(fd, ns=(found.st_mtime_ns, found.st_mtime_ns))
            return
        metadata = Metadata(
            mode=stat_bits.S_IMODE(found.st_mode),
            uid=found.st_uid if self._keep_owners else 0,
            gid=found.st_gid if self._keep_owners else 0,
            mtime_ns=found.st_mtime_ns,
        )
        if stat_bits.S_ISLNK(found.st_mode):
            with closing(_open_folder(lower)) as at:
                self.symlink(path, metadata, os.readlink(lower.name, dir_fd=at))
        else:
            self.special(path, metadata, stat_bits.S_IFMT(found.st_mode), found.st_rdev)

    def _clear(self, path: str, folder: int, name: str) -> None:
        """Remove what the layer has of that name."""
        self.owners.pop(path, None)
        found = lstat(folder, name)
        if found is None:
            return
        if stat_bits.S_ISDIR(found.st_mode):
            remove_tree(folder, name, path)
        else:
            os.unlink(name, dir_fd=folder)

    def _open_new(self, path: str, folder: int, name: str) -> int:
        try:
            return os.open(name, _WRITE_NEW, 0o600, dir_fd=folder)
        except FileExistsError:
            self._clear(path, folder, name)
        return os.open(name, _WRITE_NEW, 0o600, dir_fd=folder)

    def _set_metadata(self, fd: int, metadata: Metadata, *, needed: int) -> None:
        """Set owner, attributes and mode; `needed` are bits that this user needs to read it."""
        mode, xattrs = metadata.mode, metadata.xattrs
        if self._keep_owners:
            os.fchown(fd, metadata.uid, metadata.gid)
        else:
            xattrs = {name: value for name, value in xattrs.items() if name != CAPABILITY}
            if CAPABILITY in metadata.xattrs:
                xattrs[INTENDED + CAPABILITY] = metadata.xattrs[CAPABILITY]
            if metadata.uid or metadata.gid:
                xattrs[OWNER] = b"%d:%d" % (metadata.uid, metadata.gid)
            if mode & needed != needed:
                xattrs[MODE] = b"%o" % mode
                mode |= needed
        # After the owner, whose change clears capabilities and setuid bits.
        for name, value in xattrs.items():
            os.setxattr(fd, name, value)
        os.fchmod(fd, mode)

    def _set_owner_by_name(self, path: str, folder: int, name: str, metadata: Metadata) -> None:
        owner = (metadata.uid, metadata.gid)
        if self._keep_owners:
            os.chown(name, *owner, dir_fd=folder, follow_symlinks=False)
        elif owner != (0, 0):
            self.owners[path] = owner
        times = (metadata.mtime_ns, metadata.mtime_ns)
        os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)


def _open_folder(lower: LowerEntry) -> int:
    return os.open(lower.folder, SEARCH | os.O_NOFOLLOW | os.O_CLOEXEC)


def _open_lower(lower: LowerEntry, flags: int) -> int:
    with closing(_open_folder(lower)) as folder:
        return open_child(folder, lower.name, flags)


def _copy_metadata(source: int, found: os.stat_result, target: int, *, keep_owners: bool) -> None:
    if keep_owners:
        os.fchown(target, found.st_uid, found.st_gid)
    for name, value in xattrs_of(source).items():
        if not name.startswith(OVERLAY):
            os.setxattr(target, name, value)
    os.fchmod(target, stat_bits.S_IMODE(found.st_mode))
