"""Attacks on the host's device nodes, which are mounted into every sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import run

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

SOURCE = Path(__file__).parents[2] / "src"
UNSHARE = ("unshare", "--mount", "--propagation", "private")
CHANGE = r"""
results = []
for name in ("null", "zero", "full", "random", "urandom", "tty"):
    path = f"/dev/{name}"
    results += [attempt(os.chmod, path, 0o600), attempt(os.chown, path, 1, 1),
        attempt(os.utime, path, (1, 1)), attempt(os.unlink, path)]
output(sorted(set(results)))
"""
# In a mount namespace with device nodes of its own, so that an attack that succeeds harms nothing.
OWN_DEVICES = """
set -e
mount -t tmpfs tmpfs "$1"
mknod -m 666 "$1/null" c 1 3
mknod -m 666 "$1/zero" c 1 5
mknod -m 666 "$1/full" c 1 7
mknod -m 666 "$1/random" c 1 8
mknod -m 666 "$1/urandom" c 1 9
mknod -m 666 "$1/tty" c 5 0
mkdir "$1/shm" "$1/pts"
mount --bind "$1" /dev
shift
unshare --user --map-root-user "$@"
stat -c %a:%u /dev/null /dev/zero /dev/random
"""
# An engine that is root and has one id, so that the root of the sandbox is the host's.
ENGINE = """
import asyncio, sys
from smokebox.engine.host import Host
async def main():
    async with await Host.open(sys.argv[1], pool=0, images=sys.argv[2]) as host:
        sandbox = host.sandbox("box")
        changes = "chmod 600 /dev/null /dev/zero; chown 1:1 /dev/random; : >>/dev/null && echo ok"
        print((await sandbox.exec(changes)).stdout, end="")
asyncio.run(main())
"""


@pytest.mark.usefixtures("host_kernel")
async def test_devices_cannot_be_changed_and_can_be_used(sandbox: Sandbox) -> None:
    results = await run(sandbox, CHANGE)
    assert "done" not in results
    written = await sandbox.exec(
        "echo x >/dev/null && head -c 4 /dev/zero | wc -c && : >>/dev/null"
    )
    assert (written.stdout, written.stderr) == ("4\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes")
def test_devices_of_an_engine_that_is_root_with_one_id_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    engine = [sys.executable, "-c", ENGINE, str(tmp_path / "home"), str(tmp_path / "images")]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", OWN_DEVICES, "sh", str(tmp_path / "dev"), *engine],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.split() == ["ok", "666:0", "666:0", "666:0"], done.stderr
