"""Extraction of tar archives into directories of a sandbox, in constant memory.

Archives are as untrusted as the sandbox: members are written only below the target, never through
symlinks, without devices and setuid bits.
"""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
import stat as stat_bits
from typing import TYPE_CHECKING, Any

from smokebox.engine.files.descriptors import (
    LIST,
    SEARCH,
    closing,
    open_beneath,
    open_child,
    path_errors,
    refuse_kernel_file,
)
from smokebox.engine.files.replacement import NewFile, Replacement, rename_in, temporary_name
from smokebox.engine.files.rooted_files import DIRECTORY_MODE
from smokebox.engine.files.tar_format import Inflater, TarSource, next_member, padded
from smokebox.engine.files.trees import lstat
from smokebox.engine.workers import checkpoint
from smokebox.errors import (
    AccessDenied,
    LimitReached,
    PathError,
    PathIsDirectory,
    PathNotDirectory,
    SymlinkLoop,
    Unsupported,
    from_os_error,
)
from smokebox.foundation.compression import BrokenTar
from smokebox.sandbox.local_files import display_name

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Generator, Iterator

    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.types import Extracted

CHUNK = 256 << 10
MAX_DIRECTORIES = 100_000
_ZEROS = bytes(CHUNK)


def extract(
    files: RootedFiles,
    path: str,
    result: Extracted,
    *,
    keep_owner: bool = False,
    max_bytes: int | None = None,
    take: Callable[[int], None] = lambda size: None,
) -> Generator[None, bytes, None]:
    """Extract the archive whose bytes are sent into a directory; an empty send ends it.

    Members belong to root inside, or with `keep_owner` to the ids that they name. `take` is called
    with the size of each file before it is written, and raises if there is no room for it.
    """
    if keep_owner and files.owner.count == 1:
        raise Unsupported(
            "the sandbox has only one user, so owners cannot be kept.",
            hint="Omit keep_owner, or run the engine as root.",
            operation="keep_owner",
        )
    with path_errors(path), closing(files.open_directory(path, [])) as top:
        reader = ArchiveReader(files, top, path, result, keep_owner, max_bytes, take=take)
        inflater = Inflater()
        ended = False
        data = b"-"
        with contextlib.closing(reader):
            while data:
                data = yield
                with reader.failures():
                    for chunk in inflater.feed(data):
                        checkpoint()
                        ended = ended or reader.feed(chunk)
                    if not data and not ended:
                        inflater.finish()
                        reader.feed(b"")


class ArchiveReader:
    """Extracts one archive into an open directory, from chunks of its bytes.

    With `exact` the result equals the packed tree: all mode bits, times of symlinks, and holes
    instead of zeros. Otherwise setuid bits are dropped.
    """

    def __init__(
        self,
        files: RootedFiles,
        top: int,
        path: str,
        result: Extracted,
        keep_owner: bool,
        max_bytes: int | None,
        *,
        exact: bool = False,
        take: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._files = files
        self._take = take
        self._top = top
        self._path = path
        self._result = result
        self._keep_owner = keep_owner
        self._bytes_left = math.inf if max_bytes is None else max_bytes
        self._exact = exact
        self._source = TarSource()
        self._member = ""
        self._directories: list[tuple[str, tarfile.TarInfo]] = []
        # The directory of the last member, which is often that of the next one too.
        self._last_folder: tuple[str, int] | None = None
        self._steps = self._extract_members()
        next(self._steps)

    def feed(self, data: bytes) -> bool:
        """Extract from more bytes, none at the end. Returns True once the end mark was read."""
        try:
            self._steps.send(data)
        except StopIteration:
            return True
        return False

    def close(self) -> None:
        """Close the descriptors, and discard a file that is incomplete."""
        self._steps.close()

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Add the current member and the counts so far to errors in the block."""
        try:
            yield
        except BrokenTar as error:
            raise self._failed(PathError, f"the archive is broken: {error}") from None
        except (LimitReached, PathError) as error:
            error.fields.update(self._fields())
            raise
        except OSError as error:
            typed = from_os_error(error, self._path)
            raise self._failed(type(typed), typed.reason, typed.hint) from error

    def _failed(self, kind: type[PathError], reason: str, hint: str = "") -> PathError:
        result = self._result
        at = f" at {display_name(self._member)!r}" if self._member else ""
        return kind(
            self._path,
            f"unpacking into {self._path} failed{at}: {reason}; "
            f"{result.files} files with {result.bytes} bytes were written.",
            hint=hint,
            **self._fields(),
        )

    def _fields(self) -> dict[str, object]:
        result = self._result
        return {"member": display_name(self._member), "files": result.files, "bytes": result.bytes}

    def _extract_members(self) -> Generator[None, bytes, None]:
        try:
            while (member := (yield from next_member(self._source))) is not None:
                self._member = member.name
                relative = _relative_name(member.name)
                if relative:
                    yield from self._extract(member, relative)
                elif self._exact and member.isdir():
                    self._directories.append(("", member))
                self._member = ""
            self._finish_directories()
        finally:
            self._close_last_folder()

    def _extract(self, member: tarfile.TarInfo, relative: str) -> Generator[None, bytes, None]:
        folder, name = posixpath.split(relative)
        with closing(self._folder(folder)) as parent:
            if member.isreg():
                yield from self._extract_file(member, parent, name)
                self._result.files += 1
            elif member.isdir():
                self._make_directory(member, relative, parent, name)
            elif member.issym():
                self._make_symlink(member, parent, name)
            elif member.islnk():
                self._make_hard_link(member, parent, name)
            else:
                raise self._failed(AccessDenied, "it is neither a file, a directory nor a link")

    def _extract_file(
        self, member: tarfile.TarInfo, parent: int, name: str
    ) -> Generator[None, bytes, None]:
        self._bytes_left -= member.size
        if self._bytes_left < 0:
            raise LimitReached(
                f"the archive holds more than max_bytes, at {display_name(member.name)!r}.",
                hint="Raise max_bytes, or send less.",
                limit="max_bytes",
            )
        self._take(member.size)
        before = lstat(parent, name)
        if before is not None and stat_bits.S_ISDIR(before.st_mode):
            raise self._failed(PathIsDirectory, "a directory has its name")
        # A tree that appears as a whole needs no atomic write of each file.
        kind = NewFile if self._exact and before is None else Replacement
        with kind(parent, name, before) as file:
            left = member.size
            while left:
                chunk = yield from self._source.some(min(left, CHUNK))
                if not chunk:
                    raise BrokenTar(f"it was cut short, with {left} bytes to come")
                if self._exact and chunk == _ZEROS[: len(chunk)]:
                    os.lseek(file.fd, len(chunk), os.SEEK_CUR)
                else:
                    file.write(chunk)
                left -= len(chunk)
            if self._exact:
                os.ftruncate(file.fd, member.size)
            file.like, file.mode = None, member.mode & (0o7777 if self._exact else 0o777)
            self._set_owner(member, file.fd)
            _set_mtime(file.fd, member)
        self._result.bytes += member.size
        yield from self._source.take(padded(member.size) - member.size)

    def _make_directory(
        self, member: tarfile.TarInfo, relative: str, parent: int, name: str
    ) -> None:
        found = lstat(parent, name)
        if found is None:
            os.mkdir(name, DIRECTORY_MODE, dir_fd=parent)
        elif not stat_bits.S_ISDIR(found.st_mode):
            raise self._failed(PathNotDirectory, "something else has its name")
        self._result.directories += 1
        # A read-only mode or a time would not outlast the extraction of the content.
        if len(self._directories) < MAX_DIRECTORIES:
            self._directories.append((relative, member))

    def _finish_directories(self) -> None:
        for relative, member in reversed(self._directories):
            with (
                contextlib.suppress(FileNotFoundError),
                closing(open_beneath(self._top, relative, LIST)) as fd,
            ):
                self._set_owner(member, fd)
                os.fchmod(fd, member.mode & (0o7777 if self._exact else 0o1777))
                _set_mtime(fd, member)

    def _make_symlink(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if not member.linkname or "\0" in member.linkname:
            raise BrokenTar("a symlink has no target")

        def make(temporary: str) -> None:
            os.symlink(member.linkname, temporary, dir_fd=parent)
            if not self._exact:
                return
            if self._keep_owner:
                owner = self._owner_of(member)
                os.chown(temporary, *owner, dir_fd=parent, follow_symlinks=False)
            _set_mtime(temporary, member, dir_fd=parent, follow_symlinks=False)

        self._place_link(parent, name, make)

    def _make_hard_link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        folder, source = posixpath.split(_relative_name(member.linkname))
        with closing(self._open_existing(folder)) as source_folder:
            found = lstat(source_folder, source) if source else None
            if found is None or not stat_bits.S_ISREG(found.st_mode):
                raise self._failed(
                    AccessDenied,
                    f"it links to {display_name(member.linkname)!r}, which is no file in it",
                )
            before = lstat(parent, name)
            if before is not None and os.path.samestat(found, before):
                return

            def make(temporary: str) -> None:
                os.link(
                    source,
                    temporary,
                    src_dir_fd=source_folder,
                    dst_dir_fd=parent,
                    follow_symlinks=False,
                )

            self._place_link(parent, name, make)

    def _place_link(self, parent: int, name: str, make: Callable[[str], None]) -> None:
        temporary = temporary_name(fresh=lstat(parent, name) is None)
        make(temporary)
        try:
            rename_in(parent, temporary, name)
        except BaseException:
            os.unlink(temporary, dir_fd=parent)
            raise
        self._result.links += 1

    def _set_owner(self, member: tarfile.TarInfo, fd: int) -> None:
        if self._keep_owner:
            os.fchown(fd, *self._owner_of(member))

    def _owner_of(self, member: tarfile.TarInfo) -> tuple[int, int]:
        owner = self._files.owner
        if not (0 <= member.uid < owner.count and 0 <= member.gid < owner.count):
            raise self._failed(AccessDenied, f"the sandbox has no id {member.uid}:{member.gid}")
        return owner.uid + member.uid, owner.gid + member.gid

    def _folder(self, relative: str) -> int:
        """Open the directory of a member, creating it if needed."""
        if not self._exact:
            return self._open_or_create(relative)
        # Safe to hold: nothing else works in there, and renaming it would take the member along.
        if self._last_folder is None or self._last_folder[0] != relative:
            self._close_last_folder()
            self._last_folder = (relative, self._open_or_create(relative))
        return os.dup(self._last_folder[1])

    def _close_last_folder(self) -> None:
        last, self._last_folder = self._last_folder, None
        if last is not None:
            os.close(last[1])

    def _open_or_create(self, relative: str) -> int:
        try:
            return self._open_existing(relative)
        except FileNotFoundError:
            fd = os.dup(self._top)
        try:
            for name in relative.split("/"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, DIRECTORY_MODE, dir_fd=fd)
                below = open_child(fd, name, SEARCH)
                os.close(fd)
                fd = below
            refuse_kernel_file(fd, self._path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_existing(self, relative: str) -> int:
        try:
            fd = open_beneath(self._top, relative, SEARCH)
        except OSError as error:
            if isinstance(from_os_error(error, relative), SymlinkLoop):
                raise self._failed(AccessDenied, "its path has a symlink in it") from None
            raise
        try:
            refuse_kernel_file(fd, self._path)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _relative_name(name: str) -> str:
    """Return a member's name without `.` and doubled slashes; raises for one outside the target."""
    names = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in names or "\0" in name:
        raise BrokenTar(f"the name {display_name(name)!r} leads out of the target")
    return "/".join(names)


def _set_mtime(file: int | str, member: tarfile.TarInfo, **options: Any) -> None:
    # A float has too few digits for nanoseconds.
    whole, _, fraction = member.pax_headers.get("mtime", str(member.mtime)).partition(".")
    with contextlib.suppress(OverflowError, ValueError):
        mtime_ns = int(whole + fraction[:9].ljust(9, "0"))
        os.utime(file, ns=(mtime_ns, mtime_ns), **options)
