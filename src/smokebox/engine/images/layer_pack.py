"""Packing of a layer as a tar archive of changes, always the same bytes for the same files."""

from __future__ import annotations

import os
import re
import stat as stat_bits
import tarfile
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import LIST, READ, closing, open_child
from smokebox.engine.files.tar_format import encode_header, padded
from smokebox.engine.files.trees import walk
from smokebox.engine.images.layer_unpack import OPAQUE as OPAQUE_MARK
from smokebox.engine.images.layer_unpack import WHITEOUT
from smokebox.engine.images.layer_writer import CAPABILITY, MODE, OWNER
from smokebox.engine.images.overlay import INTENDED, OPAQUE, is_whiteout, xattrs_of
from smokebox.engine.workers import checkpoint
from smokebox.errors import PathError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from smokebox.engine.files.trees import TreeEntry

CHUNK = 1 << 20
GENERATED = frozenset(("etc/hostname", "etc/hosts", "etc/resolv.conf"))
"""Files that every sandbox has of its own, so that no layer of it needs them."""

_KINDS = {
    stat_bits.S_IFCHR: tarfile.CHRTYPE,
    stat_bits.S_IFBLK: tarfile.BLKTYPE,
    stat_bits.S_IFIFO: tarfile.FIFOTYPE,
}
# Programs in a sandbox can set these attributes too.
_MODE, _OWNER = re.compile(rb"[0-7]{1,4}"), re.compile(rb"([0-9]{1,5}):([0-9]{1,5})")
_NOBODY = 65534
_IDS = 1 << 16
# Version 3 of a capability has the owner of its user namespace at the end.
_CAPABILITY_3, _CAPABILITY_2_BYTES = 3, 20


class LayerPacker:
    """Packs the directory of a layer.

    Args:
        path: The directory.
        owner: The host id of files of root.
        ids: Number of ids from there; 1 if all files belong to the user who stored them.
        owners: Intended owners of files that cannot have the attribute.
        skip: Paths that are left out.
    """

    def __init__(
        self,
        path: str,
        *,
        owner: int = 0,
        ids: int = _IDS,
        owners: Mapping[str, tuple[int, int]] | None = None,
        skip: frozenset[str] = frozenset(),
    ) -> None:
        self._path = path
        self._owner = owner
        self._ids = ids
        self._owners = owners or {}
        self._skip = skip
        self._first_names: dict[tuple[int, int], str] = {}

    def chunks(self) -> Generator[bytes, None, None]:
        """Yield the archive."""
        top = os.open(self._path, LIST | os.O_NOFOLLOW | os.O_CLOEXEC)
        with closing(top):
            yield from self._directory(".", top)
            for entry in walk(top, skip=self._skip.__contains__):
                yield from self._member(entry)
        # Two empty blocks end an archive, and readers expect whole records.
        yield bytes(tarfile.RECORDSIZE)

    def _member(self, entry: TreeEntry) -> Iterator[bytes]:
        found, mode = entry.stat, entry.stat.st_mode
        if is_whiteout(found):
            folder, _, name = entry.path.rpartition("/")
            yield _mark(f"{folder}/{WHITEOUT}{name}" if folder else WHITEOUT + name)
            return
        if stat_bits.S_ISDIR(mode):
            with closing(open_child(entry.folder, entry.name, LIST)) as fd:
                yield from self._directory(entry.path, fd)
            return
        if found.st_nlink > 1:
            first = self._first_names.setdefault((found.st_dev, found.st_ino), entry.path)
            if first != entry.path:
                yield self._header(entry.path, found, tarfile.LNKTYPE, {}, link=first)
                return
        if stat_bits.S_ISREG(mode):
            with closing(open_child(entry.folder, entry.name, READ)) as fd:
                yield from self._file(entry.path, fd)
        elif stat_bits.S_ISLNK(mode):
            target = os.readlink(entry.name, dir_fd=entry.folder)
            yield self._header(entry.path, found, tarfile.SYMTYPE, {}, link=target)
        elif kind := _KINDS.get(stat_bits.S_IFMT(mode)):
            yield self._header(entry.path, found, kind, {}, device=found.st_rdev)
        # A socket means nothing without its process.

    def _directory(self, path: str, fd: int) -> Iterator[bytes]:
        xattrs = xattrs_of(fd)
        yield self._header(path, os.fstat(fd), tarfile.DIRTYPE, xattrs)
        if xattrs.get(OPAQUE) == b"y":
            yield _mark(OPAQUE_MARK if path == "." else f"{path}/{OPAQUE_MARK}")

    def _file(self, path: str, fd: int) -> Iterator[bytes]:
        found = os.fstat(fd)
        yield self._header(path, found, tarfile.REGTYPE, xattrs_of(fd), size=found.st_size)
        left = found.st_size
        while left:
            checkpoint()
            chunk = os.read(fd, min(CHUNK, left))
            if not chunk:
                raise PathError(path, f"the layer {self._path} was changed at {path!r}.")
            yield chunk
            left -= len(chunk)
        yield bytes(padded(found.st_size) - found.st_size)

    def _header(
        self,
        path: str,
        found: os.stat_result,
        kind: bytes,
        xattrs: dict[str, bytes],
        *,
        size: int = 0,
        link: str = "",
        device: int = 0,
    ) -> bytes:
        uid, gid = self._owner_of(path, found, xattrs)
        mode = stat_bits.S_IMODE(found.st_mode)
        if self._ids == 1 and (intended := _MODE.fullmatch(xattrs.get(MODE, b""))):
            mode = int(intended[0], 8)
        whole = found.st_mtime_ns % 1_000_000_000 == 0
        return encode_header(
            path,
            kind,
            mode=0o777 if kind == tarfile.SYMTYPE else mode,
            uid=uid,
            gid=gid,
            size=size,
            mtime=found.st_mtime_ns // 1_000_000_000,
            link=link,
            mtime_ns=None if whole else found.st_mtime_ns,
            device=device,
            xattrs=_visible(xattrs),
        )

    def _owner_of(
        self, path: str, found: os.stat_result, xattrs: dict[str, bytes]
    ) -> tuple[int, int]:
        if self._ids == 1:
            if path in self._owners:
                return self._owners[path]
            intended = _OWNER.fullmatch(xattrs.get(OWNER, b""))
            return (int(intended[1]), int(intended[2])) if intended else (0, 0)
        ids = [number - self._owner for number in (found.st_uid, found.st_gid)]
        uid, gid = (number if 0 <= number < self._ids else _NOBODY for number in ids)
        return uid, gid


def _mark(path: str) -> bytes:
    """Encode a whiteout or an opaque mark."""
    return encode_header(path, tarfile.REGTYPE, mode=0, uid=0, gid=0, mtime=0)


def _visible(xattrs: dict[str, bytes]) -> dict[str, bytes]:
    """Return the attributes that belong into an archive, as they were in the first one."""
    found = {
        name: value
        for name, value in xattrs.items()
        if name.startswith("user.") and not name.startswith((INTENDED, "user.overlay."))
    }
    capability = xattrs.get(CAPABILITY, xattrs.get(INTENDED + CAPABILITY))
    if capability:
        if capability[3] == _CAPABILITY_3 and len(capability) > _CAPABILITY_2_BYTES:
            capability = capability[:3] + b"\2" + capability[4:_CAPABILITY_2_BYTES]
        found[CAPABILITY] = capability
    return found
