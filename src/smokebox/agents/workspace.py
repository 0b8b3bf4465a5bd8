"""Which directories of a workspace speak to an agent that works in one of them."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi


def directories(sandbox: SandboxApi, cwd: str, root: str | None = None) -> list[str]:
    """From the workspace's root down to `cwd`, absolute; only `cwd` where it is outside.

    The root is the sandbox's own directory where none is given.
    """
    here = sandbox.resolve_path(cwd)
    top = sandbox.resolve_path(root if root is not None else sandbox.cwd)
    if not f"{here.rstrip('/')}/".startswith(f"{top.rstrip('/')}/"):
        return [here]
    found = [here]
    while found[-1] != top:
        found.append(posixpath.dirname(found[-1]))
    return found[::-1]
