"""Sandboxes for the suites of the frameworks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from integrations.engine import LinuxSandbox, engine
from integrations.sdk import SingleUseSandbox, sdk
from smokebox import SandboxApi, local

MakeSandbox: TypeAlias = Callable[[Path], SandboxApi]
"""Creates a sandbox that works in an empty directory of the host, or in its own filesystem."""

SANDBOXES: Mapping[str, MakeSandbox] = {
    "local": lambda directory: local(cwd=directory),
    "linux": lambda directory: engine().sandbox(),
    "sdk": lambda directory: sdk().sandbox(),
}


def is_linux(sandbox: SandboxApi) -> bool:
    """Return whether it is a Linux sandbox, in this process or behind a server."""
    return isinstance(sandbox, LinuxSandbox | SingleUseSandbox)


async def find_linux(make: MakeSandbox, id: str) -> LinuxSandbox | SingleUseSandbox:
    """Return an existing Linux sandbox of the kind that `make` creates."""
    return await (sdk().find(id) if make is SANDBOXES["sdk"] else engine().find(id))


def permissions_hold(folder: Path) -> bool:
    """Return whether file permissions apply to the user who runs the tests."""
    locked = folder / "locked"
    locked.touch(mode=0o000)
    try:
        return not os.access(locked, os.R_OK)
    finally:
        locked.unlink()
