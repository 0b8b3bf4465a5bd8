"""Each system call, in a child process where it can do no harm."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from smokebox.engine.jail import linux

SOURCE = str(Path(linux.__file__).parents[3])
# Gives a process its privileges in new namespaces.
PRIVILEGED = """
uid, gid = os.geteuid(), os.getegid()
linux.unshare(linux.NEWUSER | linux.NEWNS | linux.NEWNET | linux.NEWUTS)
open('/proc/self/setgroups', 'w').write('deny')
open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')
open('/proc/self/gid_map', 'w').write(f'0 {gid} 1')
linux.mount(None, '/', None, linux.MS_REC | linux.MS_PRIVATE)
"""


def run(code: str, *args: str, privileged: bool = True) -> object:
    """Run `code` in a child process, and return what it passes to `output`."""
    script = "import json, os, signal, socket, sys\nfrom smokebox.engine.jail import linux\n"
    script += "def output(value): print(json.dumps(value))\n"
    script += (PRIVILEGED if privileged else "") + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        env={"PYTHONPATH": SOURCE},
        timeout=15,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_clone3_forks_into_new_namespaces_with_pidfd() -> None:
    code = """
        child = linux.clone3(linux.NEWUSER | linux.NEWPID)
        if not child.pid:
            os._exit(7 if os.getpid() == 1 else 8)
        status = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        output([status.si_pid == child.pid, status.si_status])
    """
    assert run(code, privileged=False) == [True, 7]


def test_unshare_enters_new_namespaces() -> None:
    before = os.readlink("/proc/self/ns/uts")
    assert run("output(os.readlink('/proc/self/ns/uts'))") != before


def test_mount_and_umount(tmp_path: Path) -> None:
    code = """
        linux.mount('tmpfs', sys.argv[1], 'tmpfs', linux.MS_NODEV, 'size=64k')
        open(sys.argv[1] + '/inside', 'w').close()
        seen = os.listdir(sys.argv[1])
        linux.umount(sys.argv[1])
        output([seen, os.listdir(sys.argv[1])])
    """
    assert run(code, str(tmp_path)) == [["inside"], []]


def test_mount_error_names_kind_and_target(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"mount nonesuch on {tmp_path}"):
        linux.mount("x", str(tmp_path), "nonesuch")


def test_pivot_root_changes_root(tmp_path: Path) -> None:
    code = """
        linux.mount('tmpfs', sys.argv[1], 'tmpfs')
        os.chdir(sys.argv[1])
        linux.pivot_root('.', '.')
        linux.umount('.', linux.MNT_DETACH)
        os.chdir('/')
        output(os.listdir('/'))
    """
    assert run(code, str(tmp_path)) == []


def test_detached_tree_is_attached_read_only(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").write_text("whole")
    code = """
        tree = linux.open_tree(sys.argv[1] + '/from')
        linux.mount_setattr(tree, linux.ATTR_RDONLY)
        linux.move_mount(tree, sys.argv[1] + '/to')
        try:
            open(sys.argv[1] + '/to/file', 'w')
        except OSError as error:
            output([open(sys.argv[1] + '/to/file').read(), error.errno])
    """
    assert run(code, str(tmp_path)) == ["whole", 30]


@pytest.mark.skipif(os.geteuid() != 0, reason="mapping ids of a mount needs root")
def test_mount_setattr_maps_ids_by_user_namespace(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "file").touch()
    code = """
        linux.unshare(linux.NEWNS)
        linux.mount(None, '/', None, linux.MS_REC | linux.MS_PRIVATE)
        hold, go = os.pipe()
        child = linux.clone3(linux.NEWUSER)
        if not child.pid:
            os.close(go)
            os.read(hold, 1)
            os._exit(0)
        for name in ('uid_map', 'gid_map'):
            open(f'/proc/{child.pid}/{name}', 'w').write('0 500000 65536')
        userns = os.open(f'/proc/{child.pid}/ns/user', os.O_RDONLY)
        tree = linux.open_tree(sys.argv[1])
        linux.mount_setattr(tree, 0, userns=userns)
        linux.move_mount(tree, sys.argv[1] + '/to')
        output(os.stat(sys.argv[1] + '/to/file').st_uid)
        os.close(go)
    """
    assert run(code, str(tmp_path), privileged=False) == 500000


def test_openat2_stays_in_root(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("inside")
    (tmp_path / "link").symlink_to("/../../passwd")
    root = os.open(tmp_path, os.O_PATH)
    try:
        fd = linux.openat2(root, "link", os.O_RDONLY, resolve=linux.RESOLVE_IN_ROOT)
        with open(fd) as file:
            assert not os.get_inheritable(fd)
            assert file.read() == "inside"
        with pytest.raises(FileNotFoundError, match="absent"):
            linux.openat2(root, "absent", os.O_RDONLY, resolve=linux.RESOLVE_IN_ROOT)
    finally:
        os.close(root)


def test_openat2_does_not_wait_for_leased_file(tmp_path: Path) -> None:
    leased = tmp_path / "leased"
    leased.touch()
    holder, root = os.open(leased, os.O_RDWR), os.open(tmp_path, os.O_PATH)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(BlockingIOError, match="leased"):
            linux.openat2(
                root, b"leased", os.O_RDONLY | os.O_NONBLOCK, resolve=linux.RESOLVE_BENEATH
            )
    finally:
        os.close(holder)
        os.close(root)
        signal.signal(signal.SIGIO, before)


def test_sethostname() -> None:
    assert run("linux.sethostname('box-7'); output(socket.gethostname())") == "box-7"


def test_process_name_and_command_line_are_set() -> None:
    code = """
        linux.set_process_name('smokebox-test-name')
        linux.set_command_line('smokebox')
        line = open('/proc/self/cmdline').read().strip(chr(0))
        output([open('/proc/self/comm').read(), line])
    """
    assert run(code, "a-secret-path") == ["smokebox-test-n\n", "smokebox"]


def test_process_that_is_not_dumpable_cannot_be_inspected() -> None:
    code = """
        linux.set_dumpable(False)
        output(os.stat('/proc/self/environ').st_uid == os.geteuid())
    """
    expected = os.geteuid() == 0
    assert run(code, privileged=False) == expected


def test_no_new_privileges_is_set() -> None:
    code = """
        linux.set_no_new_privileges()
        output([line.split()[1] for line in open('/proc/self/status') if 'NoNewPrivs' in line])
    """
    assert run(code, privileged=False) == ["1"]


def test_subreaper_becomes_parent_of_orphans() -> None:
    code = """
        linux.become_subreaper()
        parent = os.fork()
        if not parent:
            if os.fork():
                os._exit(0)
            signal.pause()
        os.waitpid(parent, 0)
        with open(f'/proc/self/task/{os.getpid()}/children') as file:
            [orphan] = map(int, file.read().split())
        os.kill(orphan, signal.SIGKILL)
        output(os.waitpid(orphan, 0)[1])
    """
    assert run(code, privileged=False) == signal.SIGKILL


def test_capabilities_are_those_kept() -> None:
    code = """
        keep = (linux.CAP_CHOWN, linux.CAP_KILL, linux.CAP_SYS_CHROOT)
        linux.limit_capabilities(keep)
        linux.set_capabilities(keep)
        lines = dict(line.split(':', 1) for line in open('/proc/self/status'))
        output([int(lines[name], 16) for name in ('CapEff', 'CapPrm', 'CapBnd', 'CapInh')])
    """
    mask = 1 << linux.CAP_CHOWN | 1 << linux.CAP_KILL | 1 << linux.CAP_SYS_CHROOT
    assert run(code) == [mask, mask, mask, 0]


def test_raise_loopback_brings_interface_up() -> None:
    code = """
        server = socket.socket()
        linux.raise_loopback()
        server.bind(('127.0.0.1', 0))
        server.listen()
        socket.create_connection(server.getsockname(), 5).close()
        output(True)
    """
    assert run(code) is True


def test_error_names_system_call() -> None:
    with pytest.raises(OSError, match="move_mount /absent"), socket.socket() as sock:
        linux.move_mount(sock.fileno(), "/absent")
