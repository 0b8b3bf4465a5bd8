"""Attempts of a sandbox to leave its root, or to hide files, through its own snapshots."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.host import Host

# Marks that the kernel gives a meaning in a layer, links out of it, and a path that is too long.
HOSTILE = """
import contextlib, os, stat
os.makedirs("/usr/local/share/d"); os.makedirs("/workspace/d")
for path in ("/workspace/d", "/usr", "/etc"):
    for name in ("opaque", "redirect", "metacopy", "origin", "whiteout", "overlay.opaque"):
        for prefix in ("user.overlay.", "trusted.overlay."):
            with contextlib.suppress(OSError):
                os.setxattr(path, prefix + name, b"y" if "opaque" in name else b"/SECRET")
with contextlib.suppress(OSError):
    os.mknod("/workspace/whiteout", stat.S_IFCHR, 0)
os.symlink("SECRET", "/workspace/out")
os.symlink("/" + "../" * 40 + "SECRET", "/workspace/up")
os.rename("/usr/local/share/d", "/usr/local/share/e")
os.symlink("SECRET", "/usr/local/share/d")
with open("/workspace/suid", "w") as file:
    os.fchmod(file.fileno(), 0o6755)
os.chdir("/workspace/d")
for _ in range(40):
    os.mkdir("n" * 200)
    os.chdir("n" * 200)
open("deepest", "w").close()
"""
SEEN = (
    "ls -A /usr /etc | md5sum; ls -ld /workspace/suid; readlink /workspace/out /workspace/up; "
    "cat /workspace/out /workspace/up /usr/local/share/d/secret 2>&1; ls /usr/local/share; "
    "find /workspace | wc -l; test -e /workspace/whiteout; echo $?"
)


@pytest.mark.parametrize("asleep", [True, False], ids=["moved", "copied"])
async def test_a_layer_shows_what_the_sandbox_saw_and_nothing_else(
    host: Host, tmp_path: Path, asleep: bool
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "secret").write_text("of the host")
    program = HOSTILE.replace("SECRET", str(tmp_path / "secret"))
    sandbox = await host.create("box")
    result = await sandbox.exec(["python3", "-c", program])
    assert result.success, result.stderr
    before = (await sandbox.exec(SEEN)).stdout
    assert "of the host" not in before
    if asleep:
        await sandbox.sleep()
    snapshot = await sandbox.snapshots.create()
    (fork,) = await host.fork("box")
    created = await host.create(snapshot=snapshot.id)
    for one in (sandbox, fork, created):
        assert (await one.exec(SEEN)).stdout == before
    assert os.listdir(tmp_path / "secret") == ["secret"]
    for one in (sandbox, fork, created):
        await one.destroy()
    await host.snapshots.delete(snapshot.id)
    assert await host.snapshots.record.snapshot_layers() == []
