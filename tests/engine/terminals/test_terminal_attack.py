"""What a program in a terminal may not do: type for others, reach the host's, trap the engine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.terminals.screen import looking, output_of
from smokebox.engine.terminals.line import open_pty
from smokebox.errors import SmokeboxError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

BOTH = pytest.mark.usefixtures("gvisor_too")
# Types into a terminal by TIOCSTI and TIOCLINUX, and changes what it is by TIOCSETD.
TYPE = """
import errno, fcntl, os, sys
answers = []
fd = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
for request, argument in ((0x5412, b"x"), (0x541C, b"\\x03x"), (0x5423, b"\\x02\\0\\0\\0")):
    try:
        fcntl.ioctl(fd, request, argument)
        answers.append("done")
    except OSError as error:
        answers.append(errno.errorcode[error.errno])
print("answers", *answers)
"""


async def answers_of(sandbox: Sandbox) -> set[str]:
    terminal = await sandbox.terminals.create(command=["python3", "-c", TYPE, "/dev/pts/0"])
    output = (await output_of(terminal)).decode()
    return set(output.partition("answers ")[2].split())


@BOTH
async def test_nobody_types_but_the_engine(sandbox: Sandbox) -> None:
    """The kernel of this host may allow it: dev.tty.legacy_tiocsti. The filter does not."""
    answers = await answers_of(sandbox)
    assert answers in ({"EPERM"}, {"ENOTTY"})


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one user inside")
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
    async with looking(terminal) as screen:
        await screen.type("quiet\n")
        assert await screen.shows("quiet\r\nquiet\r\n") == "quiet\r\nquiet\r\n"


async def test_the_terminals_of_a_sandbox_are_its_own(sandbox: Sandbox, host: Host) -> None:
    other = await host.create("other")
    one = await sandbox.terminals.create(command=["cat"])
    two = await other.terminals.create(command=["cat"])
    listing = "import os, json; print(json.dumps([sorted(os.listdir('/dev/pts')), os.openpty()]))"
    for box in (sandbox, other):
        result = await box.exec(["python3", "-c", listing])
        assert json.loads(result.stdout)[0] == ["0", "ptmx"]
    await other.exec("echo from outside >/dev/pts/0")
    async with looking(two) as theirs, looking(one) as ours:
        await theirs.shows("from outside")
        await ours.type("mine\n")
        await ours.shows("mine\r\nmine\r\n")
    assert b"outside" not in ours.seen


async def test_what_is_done_to_dev_does_not_lead_elsewhere(sandbox: Sandbox) -> None:
    await sandbox.exec(
        "mv /dev/pts /dev/old; rmdir /dev/pts; umount /dev/pts; rm /dev/pts/ptmx; "
        "rm -f /dev/ptmx; ln -s /etc/passwd /dev/ptmx; mv /dev /d; mount -t tmpfs none /dev/pts"
    )
    terminal = await sandbox.terminals.create(command=["tty"])
    assert await output_of(terminal) == b"/dev/pts/0\r\n"


async def test_who_shuts_the_door_has_no_terminals(sandbox: Sandbox) -> None:
    await sandbox.exec("chmod 000 /dev/pts/ptmx")
    if os.geteuid() != 0:
        with pytest.raises(Unsupported, match="no terminals to give"):
            await sandbox.terminals.create("t")
        assert await sandbox.terminals.list() == []
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


def _link_to_the_hosts(root: Path) -> None:
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
        pytest.skip("only root can make a device")


@pytest.mark.parametrize(
    "trap", [_link_to_the_hosts, _link_to_ptmx, _link_to_dev, _file, _pipe, _device]
)
def test_nothing_but_a_terminal_of_the_sandbox_is_opened(trap: Callable[[Path], None]) -> None:
    place = tempfile.mkdtemp()
    try:
        trap(Path(place))
        root = os.open(place, os.O_PATH | os.O_DIRECTORY)
        try:
            with pytest.raises(OSError):
                open_pty(root, None)
        finally:
            os.close(root)
    finally:
        shutil.rmtree(place)


async def test_output_is_held_to_its_rate(host: Host) -> None:
    sandbox = await host.create("slow", limits={"output_rate": 200_000})
    words = ["sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x"]
    terminal = await sandbox.terminals.create(command=words)
    begin = time.monotonic()
    assert len(await output_of(terminal)) == 300_000
    # Not all of it: the rest, which the kernel holds when the program has ended, comes at once.
    assert time.monotonic() - begin > 0.5


async def test_a_sandbox_without_processes_left_says_so(host: Host) -> None:
    sandbox = await host.create("small", limits={"pids": 12})
    with pytest.raises(SmokeboxError):
        for _ in range(20):
            await sandbox.terminals.create(command=["sh", "-c", "cat; true"])
    for terminal in await sandbox.terminals.list():
        await terminal.kill()
    assert (await sandbox.exec(["echo", "fine"])).stdout == "fine\n"
