"""Path rules of the sandbox contract, on text only: nothing here touches a filesystem."""

from __future__ import annotations

import posixpath

from smokebox.errors import InvalidPath


def check_path(path: str) -> str:
    """Return `path`, or raise `InvalidPath` if it is empty, has a NUL or is not UTF-8."""
    if not isinstance(path, str):
        raise InvalidPath(
            f"a path is a str, not {type(path).__name__}: {path!r}.",
            hint="Pass str(path).",
            path=repr(path),
        )
    if not path:
        raise InvalidPath(
            "the path is empty.", hint="Use '.' for the working directory.", path=path
        )
    if "\0" in path:
        raise InvalidPath(f"the path {path!r} has a NUL character.", hint="Remove it.", path=path)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidPath(
            f"the path {path!r} is not valid UTF-8.",
            hint="Rename the file with a command (`mv`) and use its new name.",
            path=ascii(path),
        ) from None
    return path


def resolve(path: str, cwd: str) -> str:
    """Return `path`, relative to `cwd`, as an absolute normalized path; `..` stops at the root."""
    joined = posixpath.normpath(posixpath.join(cwd, check_path(path)))
    # POSIX allows a special meaning for a leading "//", so normpath keeps it. Sandboxes have none.
    return "/" + joined.lstrip("/")


def parents(path: str) -> list[str]:
    """Return the directories above an absolute path, outermost first, without the root."""
    names = path.strip("/").split("/")[:-1]
    return ["/" + "/".join(names[: n + 1]) for n in range(len(names))]
