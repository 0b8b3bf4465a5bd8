"""Attacks on the host through backups: trees that change meanwhile, and planted files."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import Canary, check_alive, run, running_inside
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

ROUNDS = 6
# Swaps directories, files and symlinks, and truncates files.
SWAP = """
os.chdir("/workspace")
for name in ("one", "two"):
    os.makedirs(name + "/deep", exist_ok=True)
    write(name + "/secret", "inside " * 100000)
attempt(os.symlink, sys.argv[1], "link")
attempt(os.symlink, sys.argv[1], "one/deep/link")
number = 0
while True:
    number += 1
    syscall("renameat2", -100, b"one", -100, b"link", 2)
    syscall("renameat2", -100, b"two/secret", -100, b"two/deep", 2)
    attempt(os.truncate, "two/secret", number % 700000)
    attempt(os.mkfifo, "fifo")
    attempt(os.rename, "fifo", "two/fifo")
"""


@pytest.fixture(params=["{folder}", "../../../../../../../../..{folder}", "/proc/1/root{folder}"])
def target(request: pytest.FixtureRequest, canary: Canary) -> str:
    """Return the target of a symlink to a directory of the host."""
    template: str = request.param
    return template.format(folder=canary.folder)


async def test_backup_of_changing_tree_holds_no_file_of_the_host(
    host: Host, sandbox: Sandbox, canary: Canary, target: str
) -> None:
    created = 0
    async with running_inside(sandbox, SWAP, target):
        for _ in range(ROUNDS):
            # The outcome is a backup or a typed error.
            with contextlib.suppress(SmokeboxError):
                backup = await sandbox.backups.create()
                created += 1
                await sandbox.backups.restore(backup, path="/copy")
                found = await sandbox.exec("grep -rl . /copy | xargs -r cat")
                assert canary.TEXT not in found.stdout
    assert created
    assert canary.unharmed
    assert [name for name in os.listdir(f"{host.home}/backups") if name.endswith(".part")] == []


async def test_restore_does_not_follow_swapped_symlink(
    host: Host, sandbox: Sandbox, canary: Canary, target: str
) -> None:
    await sandbox.exec("mkdir -p d/secret; echo overwritten > d/secret/file; echo x > d/canary")
    backup = await sandbox.backups.create("/workspace/d")
    swap = """
os.chdir("/workspace")
attempt(os.symlink, sys.argv[1], "spare")
while True:
    syscall("renameat2", -100, b"spare", -100, b"d", 2)
    for name in os.listdir("."):
        if name.startswith(".smokebox"):
            for inner in ("new", "old"):
                attempt(os.rename, name + "/" + inner, "stolen")
                attempt(os.symlink, sys.argv[1], name + "/" + inner)
"""
    async with running_inside(sandbox, swap, target):
        for _ in range(ROUNDS):
            with contextlib.suppress(SmokeboxError):
                await sandbox.backups.restore(backup, path="/workspace/d")
    assert canary.unharmed
    await check_alive(sandbox)


async def test_restored_symlink_is_not_followed(
    sandbox: Sandbox, canary: Canary, target: str
) -> None:
    await sandbox.exec(["ln", "-s", target, "link"])
    backup = await sandbox.backups.create()
    # The path is a directory when the symlink is restored, and the other way round.
    await sandbox.exec("rm link; mkdir link; echo x > link/secret")
    deeper = await sandbox.backups.create()
    for one in (backup, deeper, backup):
        await sandbox.backups.restore(one)
    assert canary.unharmed
    assert (await sandbox.exec("readlink link")).stdout.strip() == target


async def test_unusual_names_are_restored(sandbox: Sandbox) -> None:
    script = """
os.chdir("/workspace")
names = [b"-rf", b"..x", b"\\xff\\xfe", b"new\\nline", b"tab\\t", b"\\x1b[31m", b"x" * 255]
names += [b"%s", b"$(id)"]
for name in names:
    os.mkdir(name)
    os.close(os.open(name + b"/" + name, os.O_CREAT | os.O_WRONLY))
deep = os.open(".", os.O_RDONLY)
for _ in range(300):
    os.mkdir("d" * 200, dir_fd=deep)
    below = os.open("d" * 200, os.O_RDONLY, dir_fd=deep)
    os.close(deep)
    deep = below
output(len(names))
"""
    count = await run(sandbox, script)
    with_depth = await sandbox.exec("find . | wc -l")
    backup = await sandbox.backups.create()
    await sandbox.exec("find . -mindepth 1 -delete")
    await sandbox.backups.restore(backup)
    assert (await sandbox.exec("find . | wc -l")).stdout == with_depth.stdout
    assert int(with_depth.stdout) >= 2 * count


@pytest.mark.parametrize("rule", ["*a" * 400 + "b", "*a" * 18 + "b", "**/" * 9 + "*a*b"])
async def test_slow_gitignore_is_aborted(sandbox: Sandbox, rule: str) -> None:
    script = "for i in range(300): os.makedirs(f'/workspace/d/{i}/aaaaaaaaaaaa')\noutput(1)"
    await run(sandbox, script)
    await sandbox.write_file("/workspace/.gitignore", f"{rule}\n" * 2000)
    backup = asyncio.create_task(sandbox.backups.create(gitignore=True, timeout=1))
    # The engine keeps serving other calls.
    await check_alive(sandbox)
    with contextlib.suppress(SmokeboxError):
        await backup
    assert sandbox.backups.progress() == []


async def test_special_files_are_not_opened(sandbox: Sandbox) -> None:
    await run(
        sandbox,
        """
os.chdir("/workspace")
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("sock")
write("f", "x")
output("done")
""",
    )
    backup = await sandbox.backups.create(timeout=20)
    assert backup.files == 1
    await sandbox.backups.restore(backup, timeout=20)
    # Special files of gVisor exist only in its memory.
    assert (await sandbox.exec("find . -type f")).stdout == "./f\n"


async def test_planted_staging_directory_is_not_used(host: Host, sandbox: Sandbox) -> None:
    """Their names are random; a directory of the sandbox with such a name is an ordinary one."""
    planted = "/.smokebox-c0123456789abcdef/new"
    await sandbox.exec(f"echo 1 > f; mkdir -p {planted}; echo 9 > {planted}/f")
    backup = await sandbox.backups.create()
    await sandbox.exec("echo 2 > f")
    await sandbox.backups.restore(backup)
    await sandbox.sleep()
    assert await sandbox.read_file("f") == "1\n"
