"""Tar archives unpacked into directories of a sandbox, in constant memory.

An archive is as hostile as a sandbox: its members are written below the target and
nowhere else, through directories only, without devices and setuid bits.
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
    naming,
    open_beneath,
    open_child,
    refuse_kernel,
)
from smokebox.engine.files.replacement import NewFile, Replacement, temporary_name
from smokebox.engine.files.rooted import DIRECTORY_MODE
from smokebox.engine.files.tar_format import BrokenTar, Inflater, TarSource, next_member, padded
from smokebox.engine.files.trees import existing
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
from smokebox.sandbox.hostfiles import shown

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Callable, Generator, Iterator

    from smokebox.engine.files.rooted import Rooted
    from smokebox.types import Extracted

PIECE = 256 << 10
MAX_DIRECTORIES = 100_000
_ZEROS = bytes(PIECE)


def extract(
    files: Rooted,
    path: str,
    result: Extracted,
    *,
    keep_owner: bool = False,
    max_bytes: int | None = None,
) -> Generator[None, bytes, None]:
    """Unpack the archive whose bytes are sent into a directory; an empty send is its end.

    Members belong to root inside, or with `keep_owner` to the ids that they name.
    """
    if keep_owner and files.owner.count == 1:
        raise Unsupported(
            "the sandbox has one user only, so owners cannot be kept.",
            hint="Leave out keep_owner, or run the engine as root.",
            operation="keep_owner",
        )
    with naming(path), closing(files.directory(path, [])) as top:
        unpacking = ArchiveReader(files, top, path, result, keep_owner, max_bytes)
        with contextlib.closing(unpacking.run()) as run:
            next(run)
            inflater = Inflater()
            unpacked = False
            data = b"-"
            while data:
                data = yield
                with unpacking.failing():
                    for piece in inflater.feed(data):
                        checkpoint()
                        unpacked = unpacked or _sent(run, piece)
                    if not data and not unpacked:
                        inflater.finish()
                        _sent(run, b"")


def _sent(run: Generator[None, bytes, None], data: bytes) -> bool:
    """Whether that was the last that it needed."""
    try:
        run.send(data)
    except StopIteration:
        return True
    return False


class ArchiveReader:
    """One archive on its way into an open directory.

    With `exact` it becomes what was packed: with all bits of modes, the times of links and
    holes instead of zeros. Else there are no setuid bits.
    """

    def __init__(
        self,
        files: Rooted,
        top: int,
        path: str,
        result: Extracted,
        keep_owner: bool,
        max_bytes: int | None,
        *,
        exact: bool = False,
    ) -> None:
        self._files = files
        self._top = top
        self._path = path
        self._result = result
        self._keep_owner = keep_owner
        self._left = math.inf if max_bytes is None else max_bytes
        self._exact = exact
        self._source = TarSource()
        self._member = ""
        self._directories: list[tuple[str, tarfile.TarInfo]] = []
        # The directory of the last member, where the next one mostly goes too.
        self._last: tuple[str, int] | None = None

    def run(self) -> Generator[None, bytes, None]:
        """Take bytes until the end mark."""
        try:
            yield from self._run()
        finally:
            self._leave()

    def _run(self) -> Generator[None, bytes, None]:
        while (member := (yield from next_member(self._source))) is not None:
            self._member = member.name
            relative = _inside(member.name)
            if relative:
                yield from self._unpack(member, relative)
            elif self._exact and member.isdir():
                self._directories.append(("", member))
            self._member = ""
        self._settle_directories()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Say at which member it failed, and what is written by then."""
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
        done = self._result
        at = f" at {shown(self._member)!r}" if self._member else ""
        return kind(
            self._path,
            f"unpacking into {self._path} failed{at}: {reason}; "
            f"{done.files} files with {done.bytes} bytes were written.",
            hint=hint,
            **self._fields(),
        )

    def _fields(self) -> dict[str, object]:
        done = self._result
        return {"member": shown(self._member), "files": done.files, "bytes": done.bytes}

    def _unpack(self, member: tarfile.TarInfo, relative: str) -> Generator[None, bytes, None]:
        folder, name = posixpath.split(relative)
        with closing(self._folder(folder)) as parent:
            if member.isreg():
                yield from self._file(member, parent, name)
                self._result.files += 1
            elif member.isdir():
                self._directory(member, relative, parent, name)
            elif member.issym():
                self._symlink(member, parent, name)
            elif member.islnk():
                self._link(member, parent, name)
            else:
                raise self._failed(AccessDenied, "it is neither a file, a directory nor a link")

    def _file(
        self, member: tarfile.TarInfo, parent: int, name: str
    ) -> Generator[None, bytes, None]:
        self._left -= member.size
        if self._left < 0:
            raise LimitReached(
                f"the archive holds more than max_bytes, at {shown(member.name)!r}.",
                hint="Raise max_bytes, or send less.",
                limit="max_bytes",
            )
        before = existing(parent, name)
        if before is not None and stat_bits.S_ISDIR(before.st_mode):
            raise self._failed(PathIsDirectory, "a directory has its name")
        # What nobody sees before it is whole needs no such care for each file.
        make = NewFile if self._exact and before is None else Replacement
        with make(parent, name, before) as file:
            left = member.size
            while left:
                piece = yield from self._source.some(min(left, PIECE))
                if not piece:
                    raise BrokenTar(f"it was cut short, with {left} bytes to come")
                if self._exact and piece == _ZEROS[: len(piece)]:
                    os.lseek(file.fd, len(piece), os.SEEK_CUR)
                else:
                    file.write(piece)
                left -= len(piece)
            if self._exact:
                os.ftruncate(file.fd, member.size)
            file.like, file.mode = None, member.mode & (0o7777 if self._exact else 0o777)
            self._give(member, file.fd)
            _set_time(file.fd, member)
        self._result.bytes += member.size
        yield from self._source.take(padded(member.size) - member.size)

    def _directory(self, member: tarfile.TarInfo, relative: str, parent: int, name: str) -> None:
        found = existing(parent, name)
        if found is None:
            os.mkdir(name, DIRECTORY_MODE, dir_fd=parent)
        elif not stat_bits.S_ISDIR(found.st_mode):
            raise self._failed(PathNotDirectory, "something else has its name")
        self._result.directories += 1
        # A mode without w, or a time, would not survive what is still to be put into it.
        if len(self._directories) < MAX_DIRECTORIES:
            self._directories.append((relative, member))

    def _settle_directories(self) -> None:
        for relative, member in reversed(self._directories):
            with (
                contextlib.suppress(FileNotFoundError),
                closing(open_beneath(self._top, relative, LIST)) as fd,
            ):
                self._give(member, fd)
                os.fchmod(fd, member.mode & (0o7777 if self._exact else 0o1777))
                _set_time(fd, member)

    def _symlink(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if not member.linkname or "\0" in member.linkname:
            raise BrokenTar("a symlink leads to no name")

        def make(at: str) -> None:
            os.symlink(member.linkname, at, dir_fd=parent)
            if self._exact:
                self._settle_link(member, parent, at)

        self._place(parent, name, make)

    def _settle_link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if self._keep_owner:
            owner = self._owner_of(member)
            os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
        _set_time(name, member, dir_fd=parent, follow_symlinks=False)

    def _link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        folder, source = posixpath.split(_inside(member.linkname))
        with closing(self._existing_folder(folder)) as there:
            found = existing(there, source) if source else None
            if found is None or not stat_bits.S_ISREG(found.st_mode):
                raise self._failed(
                    AccessDenied, f"it links to {shown(member.linkname)!r}, which is no file in it"
                )
            before = existing(parent, name)
            if before is not None and os.path.samestat(found, before):
                return
            self._place(
                parent,
                name,
                lambda at: os.link(
                    source, at, src_dir_fd=there, dst_dir_fd=parent, follow_symlinks=False
                ),
            )

    def _place(self, parent: int, name: str, make: Callable[[str], None]) -> None:
        temporary = temporary_name(fresh=existing(parent, name) is None)
        make(temporary)
        try:
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            os.unlink(temporary, dir_fd=parent)
            raise
        self._result.links += 1

    def _give(self, member: tarfile.TarInfo, fd: int) -> None:
        if self._keep_owner:
            os.fchown(fd, *self._owner_of(member))

    def _owner_of(self, member: tarfile.TarInfo) -> tuple[int, int]:
        owner = self._files.owner
        if not (0 <= member.uid < owner.count and 0 <= member.gid < owner.count):
            raise self._failed(AccessDenied, f"the sandbox has no id {member.uid}:{member.gid}")
        return owner.uid + member.uid, owner.gid + member.gid

    def _folder(self, relative: str) -> int:
        """The directory that a member goes into, made if need be."""
        if not self._exact:
            return self._opened(relative)
        # Nobody else has business in it: whoever moves it meanwhile moves what is put there.
        if self._last is None or self._last[0] != relative:
            self._leave()
            self._last = (relative, self._opened(relative))
        return os.dup(self._last[1])

    def _leave(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            os.close(last[1])

    def _opened(self, relative: str) -> int:
        try:
            return self._existing_folder(relative)
        except FileNotFoundError:
            fd = os.dup(self._top)
        try:
            for name in relative.split("/"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, DIRECTORY_MODE, dir_fd=fd)
                below = open_child(fd, name, SEARCH)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        refuse_kernel(fd, self._path)
        return fd

    def _existing_folder(self, relative: str) -> int:
        try:
            fd = open_beneath(self._top, relative, SEARCH)
        except OSError as error:
            if isinstance(from_os_error(error, relative), SymlinkLoop):
                raise self._failed(AccessDenied, "a symlink is on its way") from None
            raise
        try:
            refuse_kernel(fd, self._path)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _inside(name: str) -> str:
    """A member's name without `.` and doubled slashes; one that leads out is refused."""
    names = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in names or "\0" in name:
        raise BrokenTar(f"the name {shown(name)!r} leads out of the target")
    return "/".join(names)


def _set_time(at: int | str, member: tarfile.TarInfo, **how: Any) -> None:
    # A float has too few digits for nanoseconds.
    whole, _, fraction = member.pax_headers.get("mtime", str(member.mtime)).partition(".")
    with contextlib.suppress(OverflowError, ValueError):
        moment = int(whole + fraction[:9].ljust(9, "0"))
        os.utime(at, ns=(moment, moment), **how)
