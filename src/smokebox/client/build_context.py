"""The build context on the caller's side: a directory without what .dockerignore excludes.

Contents are identified by their digest, so that only those that the server lacks are uploaded.
"""

from __future__ import annotations

import hashlib
import os
import stat as stat_bits
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from e2b_dockerfile_utils import PatternMatcher

from smokebox.errors import InvalidOption, PathError, PathNotFound, from_os_error
from smokebox.wire.builds import ContextEntry

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCKERFILE = "Dockerfile"
IGNORE = ".dockerignore"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """A Dockerfile with the entries it may copy. `contents` are local paths by digest.

    `file` is the name of the Dockerfile in errors.
    """

    dockerfile: str
    file: str = DOCKERFILE
    entries: tuple[ContextEntry, ...] = ()
    contents: dict[str, str] = field(default_factory=dict)

    def with_tree(self, source: str, path: str) -> BuildContext:
        """Return the context with a local file or directory added at a path in it.

        Raises:
            PathError: The source cannot be read.
        """
        tree = _Tree(source, PatternMatcher([]))
        entries = [*self.entries, *tree.below(path)]
        return replace(self, entries=tuple(entries), contents={**self.contents, **tree.contents})


def read_context(
    path: str | os.PathLike[str], *, file: str | os.PathLike[str] | None = None
) -> BuildContext:
    """Read the Dockerfile of a path, and list and hash the files beside it.

    Args:
        path: A directory, or a Dockerfile, whose directory is then the context.
        file: The Dockerfile, if it has another name or place than `Dockerfile` in the directory.

    Raises:
        PathError: A file cannot be read.
        InvalidOption: The .dockerignore is not valid, or a name is not UTF-8.
    """
    root = os.path.abspath(os.fspath(path))
    if file is None and not os.path.isdir(root):
        root, file = os.path.dirname(root), root
    dockerfile = os.path.join(root, DOCKERFILE) if file is None else os.path.abspath(file)
    text = _read_text(dockerfile, hint="Pass its path, or with -f its name.")
    tree = _Tree(root, _ignore_rules(root, dockerfile))
    entries = tuple(tree.below(""))
    inside = os.path.relpath(dockerfile, root)
    shown = dockerfile if inside.startswith("..") else inside
    return BuildContext(dockerfile=text, file=shown, entries=entries, contents=tree.contents)


def _read_text(path: str, *, hint: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError:
        raise PathNotFound(path, f"there is no file {path}.", hint=hint) from None
    except UnicodeDecodeError:
        raise PathError(path, f"{path} is not UTF-8 text.") from None
    except OSError as error:
        raise from_os_error(error, path) from error


def _ignore_rules(root: str, dockerfile: str) -> PatternMatcher:
    """Return the rules of `NAME.dockerignore` beside the Dockerfile, else of the context."""
    for path in (dockerfile + IGNORE, os.path.join(root, IGNORE)):
        if not os.path.isfile(path):
            continue
        lines = _read_text(path, hint="").removeprefix("\ufeff").splitlines()
        try:
            return PatternMatcher(lines)
        except ValueError as error:
            raise InvalidOption(
                f"{path} is not valid: {error}.",
                hint="Correct the pattern.",
                option="dockerignore",
                value=path,
            ) from None
    return PatternMatcher([])


class _Tree:
    """Reads a local file or directory. `contents` fills with local paths by digest."""

    def __init__(self, root: str, ignore: PatternMatcher) -> None:
        self._root = root
        self._ignore = ignore
        self._rules = bool(ignore.patterns)
        self.contents: dict[str, str] = {}

    def below(self, prefix: str) -> Iterator[ContextEntry]:
        """Yield the entries, at a path of the context."""
        try:
            found = os.lstat(self._root)
            if stat_bits.S_ISDIR(found.st_mode):
                if prefix:
                    yield _directory(prefix, found)
                yield from self._walk("", prefix)
            elif (entry := self._entry(self._root, prefix, os.stat(self._root))) is not None:
                yield entry
        except OSError as error:
            if isinstance(error, PathError):
                raise
            typed = from_os_error(error, error.filename or self._root)
            typed.hint = typed.hint or f"Exclude it in {IGNORE} if the build does not need it."
            raise typed from error

    def _walk(self, folder: str, prefix: str) -> Iterator[ContextEntry]:
        with os.scandir(os.path.join(self._root, folder)) as scan:
            found = sorted(scan, key=lambda one: one.name)
        for one in found:
            path = f"{folder}/{one.name}" if folder else one.name
            excluded = self._rules and self._ignore.matches(path)
            is_directory = one.is_dir(follow_symlinks=False)
            if excluded and not (is_directory and self._ignore.may_match_under(path)):
                continue
            shown = f"{prefix}/{path}" if prefix else path
            _check_name(shown)
            status = one.stat(follow_symlinks=False)
            if is_directory:
                # An excluded directory is made again by the entries below it.
                if not excluded:
                    yield _directory(shown, status)
                yield from self._walk(path, prefix)
            elif (entry := self._entry(one.path, shown, status)) is not None:
                yield entry

    def _entry(self, path: str, shown: str, status: os.stat_result) -> ContextEntry | None:
        mode = stat_bits.S_IMODE(status.st_mode)
        if stat_bits.S_ISLNK(status.st_mode):
            target = os.readlink(path)
            return ContextEntry(
                path=shown,
                type="symlink",
                mode=0o777,
                mtime_ns=status.st_mtime_ns,
                target=target,
            )
        if not stat_bits.S_ISREG(status.st_mode):
            # A socket or a pipe has no content to send.
            return None
        digest, size = _hash(path)
        self.contents.setdefault(digest, path)
        return ContextEntry(
            path=shown,
            type="file",
            mode=mode,
            size=size,
            mtime_ns=status.st_mtime_ns,
            digest=digest,
        )


def _directory(path: str, status: os.stat_result) -> ContextEntry:
    return ContextEntry(
        path=path,
        type="directory",
        mode=stat_bits.S_IMODE(status.st_mode),
        mtime_ns=status.st_mtime_ns,
    )


def _hash(path: str) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidOption(
            f"the name {path!a} in the build context is not UTF-8.",
            hint=f"Rename it, or exclude it in {IGNORE}.",
            option="context",
            value=path,
        ) from None
