"""A directory of a sandbox gets other contents: all of them, or none.

They are unpacked beside it, in a staging directory with `new` and `old` in it. Then what the
directory has goes to `old`, and what is in `new` takes its place; the directory itself stays,
so that shells in it and watches of it see what comes. Which of these steps was begun is in
the record, and an engine that finds them half done goes on with them.

Everything here blocks, and runs in a thread that acts as the root of the sandbox. Paths are
absolute. Nothing here trusts what is found at them.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat as stat_bits
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import LIST, closing, naming, open_child
from smokebox.engine.files.operations import relocate
from smokebox.engine.files.replacement import keep_owner, temporary_name
from smokebox.engine.files.rooted import refuse_mount
from smokebox.engine.files.trees import existing, names_in, remove_tree
from smokebox.errors import PathError, PathNotDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.files.rooted import Rooted

NEW, OLD = "new", "old"

_OCTAL = re.compile(r"\\([0-7]{3})")


def staging_for(path: str) -> str:
    """Where the contents of a directory are unpacked: beside it, on the same file system."""
    return posixpath.join(posixpath.dirname(path), temporary_name(fresh=True))


def prepare(files: Rooted, path: str, staging: str) -> bool:
    """Make the staging directory of one that can be replaced; whether that is there."""
    if path == "/":
        raise PathError(
            path,
            "the whole sandbox cannot be replaced.",
            hint="Restore into a directory, such as path='/workspace'.",
        )
    with naming(path):
        files.make_directory(posixpath.dirname(path), recursive=True)
        with files.place(path) as place:
            found = existing(place.parent, place.name)
            if found is not None:
                if not stat_bits.S_ISDIR(found.st_mode):
                    raise PathNotDirectory(path, hint="Name a directory, and no link to one.")
                refuse_mount(place, found, path)
            name = posixpath.basename(staging)
            os.mkdir(name, 0o700, dir_fd=place.parent)
            with closing(open_child(place.parent, name, LIST)) as fd:
                for inner in (NEW, OLD):
                    os.mkdir(inner, 0o700, dir_fd=fd)
            return found is not None


@contextlib.contextmanager
def opened(files: Rooted, staging: str, name: str) -> Iterator[int]:
    """One of the directories in the staging directory."""
    with (
        naming(staging),
        files.place(staging) as place,
        closing(open_child(place.parent, place.name, LIST)) as fd,
        closing(open_child(fd, name, LIST)) as inner,
    ):
        yield inner


def clear(files: Rooted, path: str, staging: str) -> None:
    """Move what a directory has to `old`; one that is not there is made."""
    with naming(path), files.place(path) as place, contextlib.suppress(FileExistsError):
        os.mkdir(place.name, 0o700, dir_fd=place.parent)
    with _target(files, path) as fd, opened(files, staging, OLD) as old:
        _move_all(fd, old, path)


def fill(files: Rooted, path: str, staging: str) -> None:
    """Move what is in `new` to the directory, and have that be as it was packed."""
    with _target(files, path) as fd, opened(files, staging, NEW) as new:
        found = os.fstat(new)
        _move_all(new, fd, path)
        keep_owner(fd, found)
        os.fchmod(fd, stat_bits.S_IMODE(found.st_mode))
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def empty(files: Rooted, path: str, staging: str) -> None:
    """Move what `fill` has brought back to `new`."""
    with _target(files, path) as fd, opened(files, staging, NEW) as new:
        _move_all(fd, new, path)


def refill(files: Rooted, path: str, staging: str, *, was_there: bool) -> None:
    """Move what `clear` has taken back to the directory; one that was not there goes."""
    with _target(files, path) as fd, opened(files, staging, OLD) as old:
        _move_all(old, fd, path)
    if not was_there:
        with naming(path), files.place(path) as place:
            os.rmdir(place.name, dir_fd=place.parent)


def discard(files: Rooted, staging: str) -> None:
    """Remove the staging directory with all that is in it. Absence is fine."""
    with (
        naming(staging),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        files.place(staging) as place,
    ):
        remove_tree(place.parent, place.name, staging, stay=True)


@contextlib.contextmanager
def _target(files: Rooted, path: str) -> Iterator[int]:
    with (
        naming(path),
        files.place(path) as place,
        closing(open_child(place.parent, place.name, LIST)) as fd,
    ):
        yield fd


def _move_all(source: int, target: int, path: str) -> None:
    for name in names_in(source):
        with contextlib.suppress(FileNotFoundError):
            relocate(source, name, target, name, path)


def mounts_below(pid: int, path: str) -> list[str]:
    """Where something is mounted below a directory of a process's root.

    It would go with what is moved away, and what is in it be removed with that.
    """
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    # The kernel writes a blank as a backslash and 040.
    plain = [_OCTAL.sub(lambda found: chr(int(found[1], 8)), point) for point in points]
    return [point for point in plain if point.startswith(f"{path}/")]
