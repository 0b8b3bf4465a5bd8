"""Try something risky in a sandbox, and restore a backup if it fails.

    python examples/backups.py

The second sandbox starts with the files of the first one, which has been destroyed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox import Sandbox, get_sandbox

if TYPE_CHECKING:
    from smokebox.types import Backup


async def prepare() -> Backup:
    """Set up a project and back it up."""
    async with await Sandbox.create() as sandbox:
        await sandbox.write_file("/workspace/app.py", "print('it works')\n")
        await sandbox.exec("mkdir -p cache && head -c 1000000 /dev/zero > cache/blob")
        backup = await sandbox.create_backup(name="fresh project", ttl=86400, excludes=["cache"])
    print(f"backed up {backup.files} file of {backup.path} in {backup.size} bytes")
    return backup


async def attempt(sandbox: Sandbox, change: str) -> bool:
    """Change the project, and restore it if it no longer works."""
    before = await sandbox.create_backup()
    try:
        await sandbox.exec(change)
        result = await sandbox.exec("python3 app.py")
        if not result.success:
            await sandbox.restore_backup(before)
        return result.success
    finally:
        await sandbox.delete_backup(before)


async def main() -> None:
    """Make two attempts on a copy of the project."""
    project = await prepare()
    sandbox = get_sandbox("attempts")
    await sandbox.restore_backup(project)
    print("rewrite:", await attempt(sandbox, "echo 'import no_such_module' > app.py"))
    print("rename:", await attempt(sandbox, "sed -i 's/works/still works/' app.py"))
    print((await sandbox.exec("python3 app.py; ls")).stdout, end="")
    await sandbox.delete_backup(project)
    await sandbox.destroy()


if __name__ == "__main__":
    asyncio.run(main())
