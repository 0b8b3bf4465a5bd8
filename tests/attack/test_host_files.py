"""Attacks on the host's files through the kernel: magic links, descriptors, mounts, nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import Canary, check_alive, file_status, guest_init_pid, run
from smokebox.errors import PathError

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

# Tries to change the file that it is run from.
CHANGE_EXE = """
import os
print(os.path.realpath("/proc/self/exe"), flush=True)
def attempt(call, *args):
    try:
        call(*args)
    except OSError as error:
        print(error, flush=True)
    else:
        print("done" if call in (os.chmod, os.utime) else "written", flush=True)
attempt(os.chmod, "/proc/self/exe", 0o777)
attempt(os.utime, "/proc/self/exe", (0, 0))
attempt(os.truncate, "/proc/self/exe", 0)
for mode in ("ab", "r+b"):
    attempt(lambda: open("/proc/self/exe", mode).write(b"x"))
os.chmod("/proc/self/exe", 0)
"""
# Climbs up from the working directory.
CLIMB = "cd -P ../../../../../../../../../../../.. 2>/dev/null; cat ./{secret} 2>&1; ls"


async def test_working_directory_cannot_be_an_open_directory_of_the_host(
    sandbox: Sandbox, canary: Canary, tier: str
) -> None:
    """CVE-2024-21626: a command that starts in /proc/self/fd/N and climbs up from there."""
    for number in range(40):
        await sandbox.files.rm("/workspace/link", force=True)
        await sandbox.files.symlink(f"/proc/self/fd/{number}", "/workspace/link")
        for cwd in ("/workspace/link", f"/proc/self/fd/{number}", f"/proc/1/fd/{number}"):
            with contextlib.suppress(PathError):
                result = await sandbox.exec(CLIMB.format(secret=canary.secret), cwd=cwd)
                # Guest init in gVisor holds a directory, of the cgroups of that kernel.
                assert tier == "gvisor", f"{cwd} is a directory: {result.stdout}"
                assert Canary.TEXT not in result.stdout


@pytest.mark.parametrize("link", ["root", "cwd", "task/{pid}/cwd", "task/{pid}/root"])
async def test_links_of_guest_init_do_not_lead_to_the_host(
    sandbox: Sandbox, canary: Canary, link: str
) -> None:
    path = f"/proc/1/{link.format(pid=1)}"
    result = await sandbox.exec(f"ls {path}/; cat {path}{canary.secret}; ls {path}/../../tmp")
    assert canary.TEXT not in result.stdout
    assert os.path.basename(canary.folder) not in result.stdout


@pytest.mark.usefixtures("host_kernel")
async def test_processes_of_the_engine_cannot_be_inspected(sandbox: Sandbox) -> None:
    found = await run(
        sandbox,
        """
results = {}
for pid in pids():
    if pid != os.getpid():
        for name in ("fd", "map_files"):
            results[f"{pid} {name}"] = attempt(os.listdir, f"/proc/{pid}/{name}")
        for name in ("exe", "root", "cwd"):
            results[f"{pid} {name}"] = attempt(os.readlink, f"/proc/{pid}/{name}")
        for name in ("environ", "maps", "mem", "auxv"):
            results[f"{pid} {name}"] = attempt(read, f"/proc/{pid}/{name}")
        results[f"{pid} PTRACE_ATTACH"] = syscall("ptrace", 16, pid, 0, 0)
        results[f"{pid} PTRACE_SEIZE"] = syscall("ptrace", 0x4206, pid, 0, 0)
        buffer = ctypes.create_string_buffer(8)
        here = struct.pack("PN", ctypes.addressof(buffer), 8)
        there = struct.pack("PN", 4096, 8)
        results[f"{pid} read"] = syscall("process_vm_readv", pid, here, 1, there, 1, 0)
        results[f"{pid} pidfd_getfd"] = syscall("pidfd_getfd", os.pidfd_open(pid), 3, 0)
output(results)
""",
    )
    assert len(found) >= 10
    refusals = {"EACCES", "EPERM", "ENOENT", "ESRCH", "ENOSYS"}
    assert {what: result for what, result in found.items() if result not in refusals} == {}


@pytest.mark.parametrize(
    "program",
    [
        "#!/proc/self/exe\nimport os, sys; print(os.path.realpath('/proc/self/exe'))\n",
        "#!/proc/1/exe\n",
        "-> /proc/self/exe",
        "-> /proc/1/exe",
        "-> /proc/self/fd/3",
    ],
)
async def test_interpreter_of_the_host_cannot_be_run_or_changed(
    sandbox: Sandbox, host: Host, program: str
) -> None:
    """CVE-2019-5736: a program inside finds a file of the host behind /proc/self/exe."""
    before = file_status(sys.executable)
    if program.startswith("-> "):
        await sandbox.files.symlink(program[3:], "/workspace/program")
    else:
        await sandbox.write_file("/workspace/program", program)
        await sandbox.files.chmod("/workspace/program", 0o755)
    await sandbox.write_file("/workspace/change_exe.py", CHANGE_EXE)
    for command in (["/workspace/program"], ["/workspace/program", "/workspace/change_exe.py"]):
        result = await sandbox.exec(command, timeout=10)
        assert os.path.dirname(os.path.realpath(sys.executable)) not in result.stdout
        assert "written" not in result.stdout
    assert file_status(sys.executable) == before
    await check_alive(await host.create("the-next"))


async def test_replaced_shell_gains_nothing(sandbox: Sandbox) -> None:
    before = file_status(sys.executable)
    await sandbox.exec(["rm", "-f", "/bin/bash"])
    if await sandbox.exists("/bin/bash"):
        pytest.skip("the programs of the host cannot be replaced here")
    await sandbox.files.symlink("/proc/self/exe", "/bin/bash")
    await sandbox.exec(CHANGE_EXE, timeout=10)
    assert file_status(sys.executable) == before


async def test_commands_inherit_three_descriptors_and_no_file_of_the_host(
    sandbox: Sandbox, tier: str
) -> None:
    list_descriptors = """
output({name: os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")})
"""
    found = await run(sandbox, list_descriptors)
    # 3 is the listing itself.
    assert set(found) == {"0", "1", "2", "3"}
    assert not any(os.path.isdir(path) for path in found.values() if not path.startswith("/proc"))
    if os.geteuid() == 0 and tier == "namespaces":
        first = await guest_init_pid(sandbox)
        for pid in (first, *_children(first)):
            links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            files = {link for link in links if link.startswith("/")}
            assert files == {"/dev/null"}


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


async def test_mounts_cannot_be_changed(sandbox: Sandbox, tier: str) -> None:
    results = await run(
        sandbox,
        """
os.makedirs("/tmp/place", exist_ok=True)
BIND, REMOUNT, MOVE, DETACH = 4096, 32, 8192, 2
results = [
    syscall("mount", b"/", b"/tmp/place", None, BIND, None),
    syscall("mount", b"none", b"/tmp/place", b"tmpfs", 0, None),
    syscall("mount", b"none", b"/tmp/place", b"proc", 0, None),
    syscall("mount", b"none", b"/tmp/place", b"overlay", 0,
            b"lowerdir=/,upperdir=/tmp,workdir=/tmp"),
    syscall("mount", None, b"/run/smokebox", None, BIND | REMOUNT, None),
    syscall("mount", None, b"/proc/sys", None, BIND | REMOUNT, None),
    syscall("mount", b"/proc/sys", b"/tmp/place", None, MOVE, None),
    *(syscall("umount2", path, DETACH) for path in (b"/", b"/proc/keys", b"/proc/sys", b"/usr")),
    syscall("pivot_root", b"/tmp", b"/tmp/place"),
    syscall("open_tree", -100, b"/", 1),
    syscall("fsopen", b"proc", 0),
    syscall("fspick", -100, b"/", 0),
    syscall("mount_setattr", -100, b"/run/smokebox", 0, bytes(32), 32),
    syscall("open_by_handle_at", -100, struct.pack("=IiIII", 8, 1, 2, 0, 0), 0),
    syscall("setns", 0, 0),
]
output([results, [syscall("unshare", 0x20000), syscall("unshare", 0x10000000)]])
""",
    )
    refused = {"EPERM", "ENOSYS", "EACCES", "EINVAL", "ENODEV", "EBADF", "ENOTSUP"}
    assert set(results[0]) <= refused
    if tier == "namespaces":
        # gVisor allows namespaces of its own kernel.
        assert set(results[1]) <= refused


async def test_parent_of_root_is_root(sandbox: Sandbox, canary: Canary) -> None:
    """The escape from a chroot, which root inside may create, ends at the sandbox's root."""
    found = await run(
        sandbox,
        """
os.makedirs("/tmp/hole", exist_ok=True)
top = os.open("/", os.O_RDONLY)
os.chroot("/tmp/hole")
os.fchdir(top)
for _ in range(100):
    os.chdir("..")
os.chroot(".")
output({"names": os.listdir("/"), "read": attempt(read, sys.argv[1])})
""",
        canary.secret,
    )
    assert "workspace" in found["names"]
    assert not {"merged", "low0", "data", "old_root"} & set(found["names"])
    assert found["read"] == "ENOENT"


async def test_device_nodes_are_refused_or_unusable(sandbox: Sandbox, tier: str) -> None:
    results = await run(
        sandbox,
        """
kinds = {"mem": (0o20666, 1, 1), "kmsg": (0o20666, 1, 11), "disk": (0o60666, 254, 0),
         "loop": (0o60666, 7, 0), "fuse": (0o20666, 10, 229), "kvm": (0o20666, 10, 232)}
results = {}
for name, (mode, major, minor) in kinds.items():
    for folder in ("/workspace", "/dev", "/dev/shm", "/tmp"):
        path = f"{folder}/{name}"
        results[path] = attempt(os.mknod, path, mode, os.makedev(major, minor))
        if results[path] == "done":
            results[path] = attempt(os.open, path, os.O_RDWR)
output([results, sorted(os.listdir("/dev"))])
""",
    )
    nodes, names = results
    if tier == "gvisor":
        # Its kernel has one of these devices, its own; the others are not connected to anything.
        nodes = {path: result for path, result in nodes.items() if not path.endswith("/fuse")}
        names = set(names) - {path.rpartition("/")[2] for path in results[0]}
    assert set(nodes.values()) <= {"EPERM", "EACCES", "ENXIO", "ENODEV"}
    known = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero console"
    assert set(names) <= set(known.split())


async def test_changes_to_image_layers_stay_in_the_sandbox(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    target = os.path.realpath(shutil.which("env") or "")
    before = file_status(target), sorted(os.listdir("/usr")), sorted(os.listdir("/usr/bin"))
    await sandbox.exec(
        f"echo broken > {target}; chmod 4777 /usr/bin/id; rm -rf /usr/share/doc/a*; touch /usr/mine"
        f" /usr/bin/mine; ln {target} /workspace/env; chown -R 1000 /etc; rm -f /etc/passwd"
    )
    if os.geteuid() == 0:
        assert (await sandbox.exec(["cat", target])).stdout == "broken\n"
    assert (
        file_status(target),
        sorted(os.listdir("/usr")),
        sorted(os.listdir("/usr/bin")),
    ) == before
    assert (await neighbour.exec([target, "true"])).exit_code == 0
    assert (await neighbour.exec(["ls", "/usr/mine"])).exit_code != 0
    assert await run(neighbour, "output(os.stat('/etc/passwd').st_uid)") == 0


async def test_directory_of_the_engine_is_read_only(
    sandbox: Sandbox, tier: str, tmp_path: Path
) -> None:
    await sandbox.create_session()
    [pipes] = (tmp_path / "home" / "boxes").glob("*/run/io")
    before = {str(path): file_status(str(path)) for path in (pipes, *pipes.iterdir())}
    results = await run(
        sandbox,
        """
where = "/run/smokebox"
names = [f"{where}/{name}" for name in os.listdir(where)] if os.access(where, os.R_OK) else []
results = [attempt(write, f"{where}/made", ""), attempt(os.mkdir, f"{where}/made"),
           attempt(os.chmod, where, 0o777), attempt(os.chown, where, 0, 0),
           attempt(os.symlink, "/", f"{where}/link"), attempt(os.rename, where, "/run/away"),
           attempt(os.link, "/etc/passwd", f"{where}/hard"), attempt(os.rmdir, where)]
for name in names:
    results += [attempt(os.rename, name, f"{name}.away"), attempt(os.chmod, name, 0o777),
                attempt(os.utime, name, (0, 0)), attempt(os.setxattr, name, "user.x", b"y")]
output(results)
""",
    )
    if tier == "namespaces":
        # gVisor reports success for some without doing them.
        assert set(results) <= {"EROFS", "EBUSY", "EPERM", "EXDEV", "EACCES", "EEXIST"}
    assert {str(path): file_status(str(path)) for path in (pipes, *pipes.iterdir())} == before


async def test_overlay_attributes_cannot_be_forged(sandbox: Sandbox, canary: Canary) -> None:
    """Attributes by which an overlay finds lower layers, set in the upper layer."""
    results = await run(
        sandbox,
        """
os.mkdir("/workspace/d")
results = []
for space in ("user", "trusted"):
    for name, value in (("redirect", sys.argv[1].encode()), ("opaque", b"y"), ("metacopy", b""),
                        ("origin", bytes(29)), ("whiteout", b""), ("data", sys.argv[1].encode())):
        results.append(attempt(os.setxattr, "/workspace/d", f"{space}.overlay.{name}", value))
results.append(attempt(os.mknod, "/workspace/white", 0o20000, os.makedev(0, 0)))
output(results)
""",
        str(canary.folder),
    )
    assert len(results) == 13
    await sandbox.sleep()
    assert (await sandbox.exec("ls -A /workspace/d")).stdout == ""
    assert (
        "secret" not in (await sandbox.exec("find /workspace /etc /run /tmp -name secret")).stdout
    )
    assert canary.unharmed


async def test_setuid_programs_gain_nothing(sandbox: Sandbox, tier: str) -> None:
    made = await sandbox.exec(
        "cp /usr/bin/id /workspace/own-id; chmod 4755 /workspace/own-id; test -u /workspace/own-id"
    )
    assert made.success, made.stderr
    for user in ("nobody", None):
        if user is not None and os.geteuid() != 0:
            continue
        shown = await sandbox.exec(
            "/workspace/own-id -u; grep -E 'NoNewPrivs' /proc/self/status", user=user
        )
        kept = ["NoNewPrivs:", "1"] if tier == "namespaces" else []
        assert shown.stdout.split() == ["65534" if user else "0", *kept]


async def test_file_capabilities_are_refused(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
write("/workspace/tool", "")
# VFS_CAP_REVISION_2 with every capability permitted and effective.
every = struct.pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0)
output(attempt(os.setxattr, "/workspace/tool", "security.capability", every))
""",
    )
    assert results in ("EPERM", "ENOTSUP", "EINVAL")


@pytest.mark.parametrize("planted", ["symlink to {folder}", "file", "symlink to /proc", "nothing"])
async def test_planted_files_at_mount_points_are_not_followed(
    sandbox: Sandbox, canary: Canary, tier: str, planted: str
) -> None:
    """CVE-2021-30465: a symlink of the sandbox, followed during the set-up of its root."""
    await sandbox.sleep()
    for top in _uppers(canary.folder.parent):
        for name in ("dev", "proc", "run"):
            path = os.path.join(top, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            if planted.startswith("symlink"):
                os.symlink(planted.removeprefix("symlink to ").format(folder=canary.folder), path)
            elif planted == "file":
                with open(path, "w"):
                    pass
    await check_alive(sandbox)
    assert canary.unharmed
    for path in ("/dev/null", "/proc/1/status", "/run/smokebox"):
        assert (await sandbox.exec(["test", "-e", path])).exit_code == 0


def _uppers(home: Path) -> list[str]:
    """Return the upper layers of all sandboxes on the host."""
    return [str(path) for path in home.glob("home/boxes/*/data/upper/0")]


@pytest.mark.parametrize("name", ["hosts", "hostname"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/run/smokebox", "missing/directory"])
async def test_planted_files_do_not_block_the_engine(
    sandbox: Sandbox, host: Host, name: str, kind: str
) -> None:
    make = f"mkfifo /etc/{name}" if kind == "fifo" else f"ln -s {kind} /etc/{name}"
    await sandbox.exec(f"rm /etc/{name}; {make}")
    await sandbox.sleep()
    await check_alive(sandbox)


async def test_files_on_disk_have_the_owner_they_have_inside(
    sandbox: Sandbox, canary: Canary, tier: str
) -> None:
    """Files copied out of a state directory keep their owner."""
    await sandbox.exec("echo mine > /workspace/file; chmod 4755 /workspace/file")
    paths = [os.path.join(top, "workspace/file") for top in _uppers(canary.folder.parent)]
    found = os.stat(next(path for path in paths if os.path.exists(path)))
    assert found.st_uid == os.geteuid()
    assert stat.S_IMODE(canary.folder.parent.joinpath("home").stat().st_mode) & 0o007 == 0
