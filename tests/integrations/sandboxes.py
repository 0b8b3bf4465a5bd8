"""The sandboxes that run the suites of the frameworks. One line each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from integrations.engine import LinuxSandbox, engine
from integrations.sdk import OwnSandbox, sdk
from smokebox import SandboxApi, local

MakeSandbox: TypeAlias = Callable[[Path], SandboxApi]
"""Makes a sandbox that works in an empty directory of the host, or in a place of its own."""

SANDBOXES: Mapping[str, MakeSandbox] = {
    "local": lambda directory: local(cwd=directory),
    "linux": lambda directory: engine().sandbox(),
    "sdk": lambda directory: sdk().sandbox(),
}


def is_linux(sandbox: SandboxApi) -> bool:
    """Whether it is a Linux of its own, of this process or behind a server."""
    return isinstance(sandbox, LinuxSandbox | OwnSandbox)


async def find_linux(make: MakeSandbox, id: str) -> LinuxSandbox | OwnSandbox:
    """A Linux sandbox that is there, of those that `make` makes."""
    return await (sdk().find(id) if make is SANDBOXES["sdk"] else engine().find(id))


def permissions_hold(folder: Path) -> bool:
    """Whether the one who runs the tests is bound by the permissions of files."""
    locked = folder / "locked"
    locked.touch(mode=0o000)
    try:
        return not os.access(locked, os.R_OK)
    finally:
        locked.unlink()
