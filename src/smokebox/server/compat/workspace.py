"""The only place that the bridge protocol reaches: /workspace, and what is below it."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from smokebox.errors import PathError, PathNotFound
from smokebox.server.compat.refusal import Refusal

if TYPE_CHECKING:
    from smokebox.engine import Sandbox

WORKSPACE = "/workspace"
_MOST_LINKS = 40


def workspace_path(path: str) -> str:
    """A path without `.` and `..`, once it is in the workspace, where relative ones begin."""
    whole = posixpath.normpath(posixpath.join(WORKSPACE, path))
    return _inside(f"/{whole.lstrip('/')}")


async def contained(sandbox: Sandbox, path: str) -> str:
    """Where a path leads once its links are followed, which is in the workspace too.

    What changes after this look changes by who may do everything in the sandbox: this keeps
    a client from leaving the workspace unawares, not a sandbox from itself.
    """
    here, ahead, links = "/", _names(path), 0
    while ahead:
        name = ahead.pop()
        if name == "..":
            here = posixpath.dirname(here)
            continue
        step = posixpath.join(here, name)
        try:
            target = await sandbox.files.readlink(step)
        except PathNotFound:
            return _inside(posixpath.normpath(posixpath.join(step, *reversed(ahead))))
        except PathError:
            # No link: a file, a directory, or what cannot be looked at.
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise Refusal(403, f"{path} leads through too many links")
        here = "/" if target.startswith("/") else here
        ahead += _names(target)
    return _inside(here)


def _names(path: str) -> list[str]:
    """The names on a path, the first of them last."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _inside(path: str) -> str:
    if path != WORKSPACE and not path.startswith(f"{WORKSPACE}/"):
        raise Refusal(403, "path must resolve to a location within /workspace")
    return path
