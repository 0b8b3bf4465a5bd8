"""Unpacking of a layer, a tar archive of changes, into a directory. Archives are untrusted.

Nothing is written outside of the directory: names with `..` and names below a symlink are
refused. Files that hide others become whiteouts of the kernel's overlay file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat as stat_bits
import tarfile
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine.files.tar_format import XATTR, TarSource, next_member, padded
from smokebox.engine.images.layer_writer import CAPABILITY, MAX_ID, LayerWriter, Metadata, unsafe
from smokebox.engine.images.overlay import INTENDED, OVERLAY
from smokebox.engine.workers import checkpoint
from smokebox.errors import ImageError, LimitReached, SmokeboxError, from_os_error
from smokebox.foundation.compression import BrokenTar, decompress
from smokebox.sandbox.local_files import display_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping


T = TypeVar("T")

CHUNK = 1 << 20
WHITEOUT, RESERVED, OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"

# Headers and padding that a member takes in the archive at most, on average.
_HEADER_BYTES = 4096
# The kernel takes shorter paths only.
_LONGEST_NAME = 4095
_SPECIAL = {
    tarfile.CHRTYPE: stat_bits.S_IFCHR,
    tarfile.BLKTYPE: stat_bits.S_IFBLK,
    tarfile.FIFOTYPE: stat_bits.S_IFIFO,
}


class LayerUnpacker:
    """Unpacks one blob with a writer, and verifies its digests. Blocks: run it in a thread."""

    def __init__(self, writer: LayerWriter, *, digest: str, diff_id: str, max_stream: int) -> None:
        self._writer = writer
        self._digest = digest
        self._diff_id = diff_id
        self._left = max_stream
        self._source = TarSource()
        self._plain: Iterator[bytes] = iter(())
        self._member = ""

    def run(self, chunks: Iterator[bytes]) -> None:
        """Unpack the blob of these chunks to its end.

        Raises:
            ImageError: The blob is damaged, unsafe, or not what the digests say.
            LimitReached: It is larger than the limits.
            StorageFull: The disk is full.
        """
        blob = _Hash(self._digest, chunks)
        with self._failures():
            self._plain = plain = _Hash(self._diff_id, self._limited(decompress(blob)))
            try:
                self._unpack_members()
                # Bytes after the end mark are part of what the digests cover.
                plain.check("layer")
            except BrokenTar:
                # A blob that was altered or cut short is better described by its digest.
                blob.check("blob")
                raise
            blob.check("blob")
            self._writer.finish()

    def _limited(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._left -= len(chunk)
            if self._left < 0:
                raise LimitReached(
                    "a layer of the image is larger than allowed once it is unpacked.",
                    hint="Raise the limit of images, or use a smaller image.",
                    limit="layer_bytes",
                )
            yield chunk

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BrokenTar as error:
            raise ImageError(
                f"a layer of the image is damaged{self._at()}: {error}.",
                hint="Pull or build the image again.",
                reason="damaged",
                image=self._diff_id,
            ) from None
        except SmokeboxError as error:
            error.fields.setdefault("image", self._diff_id)
            raise
        except OSError as error:
            typed = from_os_error(error, self._member or "layer")
            typed.message = f"cannot unpack a layer of the image{self._at()}: {typed.message}"
            raise typed from error

    def _at(self) -> str:
        return f" at {display_name(self._member)!r:.200}" if self._member else ""

    def _drive(self, step: Generator[None, bytes, T]) -> T:
        """Run a reader of `tar_format` with bytes of the archive."""
        try:
            next(step)
            while True:
                step.send(next(self._plain, b""))
        except StopIteration as done:
            result: T = done.value
            return result

    def _unpack_members(self) -> None:
        # Some tools omit the end mark; the digest tells if the archive was cut short.
        while not self._drive(self._source.ended()):
            self._member = ""
            member = self._drive(next_member(self._source))
            if member is None:
                break
            self._member = member.name
            self._unpack(member)
        self._member = ""

    def _unpack(self, member: tarfile.TarInfo) -> None:
        folder, name = split_name(member.name)
        path = "/".join((*folder, name) if name else folder)
        if name.startswith(WHITEOUT):
            self._hide("/".join(folder), name)
            if member.isreg():
                self._skip(member.size)
        elif not path:
            if member.isdir():
                self._writer.directory("", _metadata(member))
        elif member.isreg():
            self._writer.file(path, _metadata(member), member.size, self._content(member.size))
        elif member.isdir():
            self._writer.directory(path, _metadata(member))
        elif member.issym():
            if not member.linkname or "\0" in member.linkname:
                raise BrokenTar("a symlink has no target")
            self._writer.symlink(path, _metadata(member), member.linkname)
        elif member.islnk():
            target_folder, target = split_name(member.linkname)
            self._writer.hard_link(path, "/".join((*target_folder, target)))
        elif member.type in _SPECIAL:
            device = os.makedev(member.devmajor, member.devminor) if not member.isfifo() else 0
            self._writer.special(path, _metadata(member), _SPECIAL[member.type], device)
        else:
            raise BrokenTar(f"it has the unknown type {member.type!r}")

    def _hide(self, folder: str, name: str) -> None:
        if name == OPAQUE:
            self._writer.opaque(folder)
        elif not name.startswith(RESERVED):
            hidden = name.removeprefix(WHITEOUT)
            if hidden in ("", ".", ".."):
                raise unsafe(f"it hides {hidden!r}")
            self._writer.whiteout(f"{folder}/{hidden}" if folder else hidden)

    def _content(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            checkpoint()
            chunk = self._drive(self._source.some(min(left, CHUNK)))
            if not chunk:
                raise BrokenTar(f"it was cut short, with {left} bytes to come")
            yield chunk
            left -= len(chunk)
        self._drive(self._source.take(padded(size) - size))

    def _skip(self, size: int) -> None:
        for _ in self._content(size):
            pass


def stream_limit(max_bytes: int, max_files: int) -> int:
    """Return the size of a plain archive with so many bytes and files at most."""
    return max_bytes + (max_files + 256) * _HEADER_BYTES


def split_name(name: str) -> tuple[list[str], str]:
    """Return the directories and the last part of a member's name, which is below the root.

    Both are empty for the root itself.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise unsafe(f"the name {display_name(name)!r:.200} leads out of it")
    if "\0" in name:
        raise BrokenTar("a name has a NUL")
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise unsafe("it has a name that is longer than any path")
    if any(part.startswith(WHITEOUT) for part in parts[:-1]):
        raise unsafe(f"the name {display_name(name)!r:.200} is below a whiteout")
    return (parts[:-1], parts[-1]) if parts else ([], "")


def _metadata(member: tarfile.TarInfo) -> Metadata:
    if not (0 <= member.uid <= MAX_ID and 0 <= member.gid <= MAX_ID):
        raise ImageError(
            f"{display_name(member.name)!r:.200} belongs to {member.uid}:{member.gid}, and "
            f"sandboxes have ids up to {MAX_ID}.",
            hint="Build the image with smaller ids.",
            reason="unsupported",
        )
    return Metadata(
        mode=member.mode & 0o7777,
        uid=member.uid,
        gid=member.gid,
        mtime_ns=_mtime_ns(member),
        xattrs=_xattrs(member.pax_headers),
    )


def _xattrs(records: Mapping[str, str]) -> dict[str, bytes]:
    """Return the extended attributes to keep: those of users, and capabilities."""
    found = {
        key.removeprefix(XATTR): os.fsencode(value)
        for key, value in records.items()
        if key.startswith(XATTR)
    }
    return {
        name: value
        for name, value in found.items()
        if name == CAPABILITY
        or (name.startswith("user.") and not name.startswith((*OVERLAY, INTENDED)))
    }


def _mtime_ns(member: tarfile.TarInfo) -> int:
    # A float has too few digits for nanoseconds.
    whole, _, fraction = member.pax_headers.get("mtime", str(int(member.mtime))).partition(".")
    try:
        seconds, nanoseconds = int(whole), int(fraction[:9].ljust(9, "0") or 0)
    except ValueError:
        raise BrokenTar("its time is not a number") from None
    if not -(1 << 33) < seconds < 1 << 34:
        return 0
    return seconds * 1_000_000_000 + (-nanoseconds if whole.startswith("-") else nanoseconds)


class _Hash:
    """Passes chunks on, and compares their digest to the expected one, if that is known."""

    def __init__(self, expected: str, chunks: Iterator[bytes]) -> None:
        self._expected = expected
        self._chunks = chunks
        self._hash = hashlib.new(expected.partition(":")[0] or "sha256")

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        chunk = next(self._chunks)
        self._hash.update(chunk)
        return chunk

    def check(self, what: str) -> None:
        """Read the rest, and raise unless the digest is the expected one."""
        for _ in self:
            checkpoint()
        found = f"{self._hash.name}:{self._hash.hexdigest()}"
        if self._expected and found != self._expected:
            raise ImageError(
                f"a {what} of the image was altered: its digest is {found}, not {self._expected}.",
                hint="Pull it again; if that fails again, its source is damaged.",
                reason="mismatch",
                image=self._expected,
            )
