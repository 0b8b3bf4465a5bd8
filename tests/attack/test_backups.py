"""Attempts on the host by way of backups: trees that change under them, and what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from attack.inside import Canary, alive, meanwhile, run
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

ROUNDS = 6
# Directories, files and links take each other's place, and files shrink and grow.
CHURN = """
os.chdir("/workspace")
for name in ("one", "two"):
    os.makedirs(name + "/deep", exist_ok=True)
    write(name + "/secret", "inside " * 100000)
attempt(os.symlink, sys.argv[1], "link")
attempt(os.symlink, sys.argv[1], "one/deep/link")
number = 0
while True:
    number += 1
    ask("renameat2", -100, b"one", -100, b"link", 2)
    ask("renameat2", -100, b"two/secret", -100, b"two/deep", 2)
    attempt(os.truncate, "two/secret", number % 700000)
    attempt(os.mkfifo, "fifo")
    attempt(os.rename, "fifo", "two/fifo")
"""


@pytest.fixture(params=["{folder}", "../../../../../../../../..{folder}", "/proc/1/root{folder}"])
def target(request: pytest.FixtureRequest, canary: Canary) -> str:
    """How a link names a directory of the host."""
    way: str = request.param
    return way.format(folder=canary.folder)


async def test_a_tree_that_changes_under_a_backup_gives_away_nothing(
    host: Host, sandbox: Sandbox, canary: Canary, target: str
) -> None:
    made = 0
    async with meanwhile(sandbox, CHURN, target):
        for _ in range(ROUNDS):
            # What it comes to is a backup, or an error of ours.
            with contextlib.suppress(SmokeboxError):
                backup = await sandbox.backups.create()
                made += 1
                await sandbox.backups.restore(backup, path="/copy")
                found = await sandbox.exec("grep -rl . /copy | xargs -r cat")
                assert canary.TEXT not in found.stdout
    assert made
    assert canary.unharmed
    assert [name for name in os.listdir(f"{host.home}/backups") if name.endswith(".part")] == []


async def test_a_directory_that_becomes_a_link_is_not_restored_through(
    host: Host, sandbox: Sandbox, canary: Canary, target: str
) -> None:
    await sandbox.exec("mkdir -p d/secret; echo overwritten > d/secret/file; echo x > d/canary")
    backup = await sandbox.backups.create("/workspace/d")
    swap = """
os.chdir("/workspace")
attempt(os.symlink, sys.argv[1], "spare")
while True:
    ask("renameat2", -100, b"spare", -100, b"d", 2)
    for name in os.listdir("."):
        if name.startswith(".smokebox"):
            for inner in ("new", "old"):
                attempt(os.rename, name + "/" + inner, "stolen")
                attempt(os.symlink, sys.argv[1], name + "/" + inner)
"""
    async with meanwhile(sandbox, swap, target):
        for _ in range(ROUNDS):
            with contextlib.suppress(SmokeboxError):
                await sandbox.backups.restore(backup, path="/workspace/d")
    assert canary.unharmed
    await alive(sandbox)


async def test_a_link_in_a_backup_leads_nowhere_else(
    sandbox: Sandbox, canary: Canary, target: str
) -> None:
    await sandbox.exec(["ln", "-s", target, "link"])
    backup = await sandbox.backups.create()
    # Whatever is at that path when it is restored, and whatever was packed below it.
    await sandbox.exec("rm link; mkdir link; echo x > link/secret")
    deeper = await sandbox.backups.create()
    for one in (backup, deeper, backup):
        await sandbox.backups.restore(one)
    assert canary.unharmed
    assert (await sandbox.exec("readlink link")).stdout.strip() == target


async def test_names_that_nobody_would_give_come_back(sandbox: Sandbox) -> None:
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
tell(len(names))
"""
    count = await run(sandbox, script)
    with_depth = await sandbox.exec("find . | wc -l")
    backup = await sandbox.backups.create()
    await sandbox.exec("find . -mindepth 1 -delete")
    await sandbox.backups.restore(backup)
    assert (await sandbox.exec("find . | wc -l")).stdout == with_depth.stdout
    assert int(with_depth.stdout) >= 2 * count


@pytest.mark.parametrize("rule", ["*a" * 400 + "b", "*a" * 18 + "b", "**/" * 9 + "*a*b"])
async def test_a_gitignore_that_takes_for_ever_is_broken_off(sandbox: Sandbox, rule: str) -> None:
    script = "for i in range(300): os.makedirs(f'/workspace/d/{i}/aaaaaaaaaaaa')\ntell(1)"
    await run(sandbox, script)
    await sandbox.write_file("/workspace/.gitignore", f"{rule}\n" * 2000)
    making = asyncio.create_task(sandbox.backups.create(gitignore=True, timeout=1))
    # The rest of the engine goes on meanwhile.
    await alive(sandbox)
    with contextlib.suppress(SmokeboxError):
        await making
    assert sandbox.backups.progress() == []


async def test_special_files_are_not_opened(sandbox: Sandbox) -> None:
    await run(
        sandbox,
        """
os.chdir("/workspace")
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("sock")
write("f", "x")
tell("made")
""",
    )
    backup = await sandbox.backups.create(timeout=20)
    assert backup.files == 1
    await sandbox.backups.restore(backup, timeout=20)
    # Those that gVisor makes are in its memory, where nobody else sees them.
    assert (await sandbox.exec("find . -type f")).stdout == "./f\n"


async def test_a_planted_staging_directory_is_not_taken_for_ours(
    host: Host, sandbox: Sandbox
) -> None:
    """The names are random, and what a sandbox makes of such a name is its own."""
    planted = "/.smokebox-c0123456789abcdef/new"
    await sandbox.exec(f"echo 1 > f; mkdir -p {planted}; echo 9 > {planted}/f")
    backup = await sandbox.backups.create()
    await sandbox.exec("echo 2 > f")
    await sandbox.backups.restore(backup)
    await sandbox.sleep()
    assert await sandbox.read_file("f") == "1\n"
