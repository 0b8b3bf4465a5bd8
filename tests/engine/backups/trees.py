"""Listings of directories to compare, and files that backups must not leave behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

# Names, kinds, modes, owners, times to the nanosecond, links, hard links and contents.
LISTING = (
    "find . -printf '%P %y %m %U:%G %T@ %l %n\\n' | LC_ALL=C sort; "
    "find . -type f -print0 | LC_ALL=C sort -z | xargs -0r sha256sum"
)


async def listing(sandbox: Sandbox, path: str = "/workspace") -> str:
    """Return names, metadata and checksums of a tree."""
    result = await sandbox.exec(LISTING, cwd=path)
    assert result.success, result.stderr
    return result.stdout


async def leftovers(host: Host, sandbox: Sandbox) -> list[str]:
    """Return staging directories in the sandbox, and files of incomplete backups on the host."""
    found = await sandbox.exec("find / -xdev -name '.smokebox-*'")
    known = {backup.id for backup in await host.backups.list()}
    names = os.listdir(f"{host.home}/backups")
    return found.stdout.split() + [name for name in names if name.partition(".")[0] not in known]
