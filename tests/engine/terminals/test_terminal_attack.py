"""Attacks by programs in terminals: on other terminals, the host's devices and the engine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.terminals.viewer import open_viewer, output_of
from smokebox.engine.terminals.channel import open_pty
from smokebox.errors import SmokeboxError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

EVERY_TIER = pytest.mark.usefixtures("every_tier")
# Injects input with TIOCSTI and TIOCLINUX, and changes the line discipline with TIOCSETD.
INJECT = """
import errno, fcntl, os, sys
results = []
fd = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
for request, argument in ((0x5412, b"x"), (0x541C, b"\\x03x"), (0x5423, b"\\x02\\0\\0\\0")):
    try:
        fcntl.ioctl(fd, request, argument)
        results.append("done")
    except OSError as error:
        results.append(errno.errorcode[error.errno])
print("results", *results)
"""


async def inject_results(sandbox: Sandbox) -> set[str]:
    terminal = await sandbox.terminals.create(command=["python3", "-c", INJECT, "/dev/pts/0"])
    output = (await output_of(terminal)).decode()
    return set(output.partition("results ")[2].split())


@EVERY_TIER
async def test_programs_cannot_inject_input(sandbox: Sandbox) -> None:
    """Even if the host allows it (dev.tty.legacy_tiocsti), the seccomp filter does not."""
    results = await inject_results(sandbox)
    assert results in ({"EPERM"}, {"ENOTTY"})


@pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")
async def test_another_user_cannot_open_a_terminal(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminals.create(command=["cat"])
    code = (
        "import os\n"
        "for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):\n"
        "    try: os.open('/dev/pts/0', flags | os.O_NOCTTY); print('open')\n"
        "    except PermissionError: print('no')\n"
    )
    result = await sandbox.exec(["python3", "-c", code], user="nobody")
    assert result.stdout == "no\nno\nno\n"
    async with open_viewer(terminal) as viewer:
        await viewer.send("quiet\n")
        assert await viewer.expect("quiet\r\nquiet\r\n") == "quiet\r\nquiet\r\n"


async def test_sandboxes_have_separate_terminals(sandbox: Sandbox, host: Host) -> None:
    other = await host.create("other")
    one = await sandbox.terminals.create(command=["cat"])
    two = await other.terminals.create(command=["cat"])
    listing = "import os, json; print(json.dumps([sorted(os.listdir('/dev/pts')), os.openpty()]))"
    for one_sandbox in (sandbox, other):
        result = await one_sandbox.exec(["python3", "-c", listing])
        assert json.loads(result.stdout)[0] == ["0", "ptmx"]
    await other.exec("echo from outside >/dev/pts/0")
    async with open_viewer(two) as theirs, open_viewer(one) as ours:
        await theirs.expect("from outside")
        await ours.send("mine\n")
        await ours.expect("mine\r\nmine\r\n")
    assert b"outside" not in ours.output


async def test_changes_of_dev_do_not_redirect_terminals(sandbox: Sandbox) -> None:
    await sandbox.exec(
        "mv /dev/pts /dev/old; rmdir /dev/pts; umount /dev/pts; rm /dev/pts/ptmx; "
        "rm -f /dev/ptmx; ln -s /etc/passwd /dev/ptmx; mv /dev /d; mount -t tmpfs none /dev/pts"
    )
    terminal = await sandbox.terminals.create(command=["tty"])
    assert await output_of(terminal) == b"/dev/pts/0\r\n"


async def test_inaccessible_ptmx_is_reported(sandbox: Sandbox) -> None:
    await sandbox.exec("chmod 000 /dev/pts/ptmx")
    if os.geteuid() != 0:
        with pytest.raises(Unsupported, match="has no terminals"):
            await sandbox.terminals.create("t")
        assert await sandbox.terminals.list() == []
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


def _link_to_host_pts(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/pts").symlink_to("/dev/pts")


def _link_to_ptmx(root: Path) -> None:
    (root / "dev/pts").mkdir(parents=True)
    (root / "dev/pts/ptmx").symlink_to("/dev/pts/ptmx")


def _link_to_dev(root: Path) -> None:
    (root / "dev").symlink_to("/dev")


def _file(root: Path) -> None:
    (root / "dev/pts").mkdir(parents=True)
    (root / "dev/pts/ptmx").write_text("")


def _pipe(root: Path) -> None:
    (root / "dev/pts").mkdir(parents=True)
    os.mkfifo(root / "dev/pts/ptmx")


def _device(root: Path) -> None:
    (root / "dev/pts").mkdir(parents=True)
    try:
        os.mknod(root / "dev/pts/ptmx", 0o20666, os.makedev(5, 2))
    except PermissionError:
        pytest.skip("devices need root")


@pytest.mark.parametrize(
    "replace", [_link_to_host_pts, _link_to_ptmx, _link_to_dev, _file, _pipe, _device]
)
def test_only_a_terminal_of_the_sandbox_is_opened(replace: Callable[[Path], None]) -> None:
    directory = tempfile.mkdtemp()
    try:
        replace(Path(directory))
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            with pytest.raises(OSError):
                open_pty(root, None)
        finally:
            os.close(root)
    finally:
        shutil.rmtree(directory)


async def test_output_rate_is_limited(host: Host) -> None:
    sandbox = await host.create("slow", limits={"output_rate": 200_000})
    command = ["sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x"]
    terminal = await sandbox.terminals.create(command=command)
    started = time.monotonic()
    assert len(await output_of(terminal)) == 300_000
    # The part that is in the kernel when the program ends is not limited.
    assert time.monotonic() - started > 0.5


async def test_process_limit_refuses_terminals(host: Host) -> None:
    sandbox = await host.create("small", limits={"pids": 12})
    with pytest.raises(SmokeboxError):
        for _ in range(20):
            # One process that lasts: a shell that cannot fork would end, and make room.
            await sandbox.terminals.create(command=["cat"])
    for terminal in await sandbox.terminals.list():
        await terminal.kill()
    assert (await sandbox.exec(["echo", "fine"])).stdout == "fine\n"
