"""Ways to the host's files by what the kernel has: magic links, descriptors, mounts, nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from attack.inside import Canary, alive, first_process, run, state_of
from smokebox.errors import PathError

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

# What a program does that finds itself run by a file of the host's.
HARM = """
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
# For all who look for a way up: what is at the end of many `..`.
CLIMB = "cd -P ../../../../../../../../../../../.. 2>/dev/null; cat ./{secret} 2>&1; ls"


async def test_no_working_directory_leads_to_an_open_directory_of_the_host(
    sandbox: Sandbox, canary: Canary, tier: str
) -> None:
    """CVE-2024-21626: a command that starts in /proc/self/fd/N, and goes up from there."""
    for number in range(40):
        await sandbox.files.rm("/workspace/way", force=True)
        await sandbox.files.symlink(f"/proc/self/fd/{number}", "/workspace/way")
        for way in ("/workspace/way", f"/proc/self/fd/{number}", f"/proc/1/fd/{number}"):
            with contextlib.suppress(PathError):
                result = await sandbox.exec(CLIMB.format(secret=canary.secret), cwd=way)
                # The agent in gVisor holds a directory, of that kernel's own cgroups.
                assert tier == "gvisor", f"{way} is a directory: {result.stdout}"
                assert Canary.TEXT not in result.stdout


@pytest.mark.parametrize("way", ["root", "cwd", "task/{pid}/cwd", "task/{pid}/root"])
async def test_the_first_process_has_no_place_to_go_to(
    sandbox: Sandbox, canary: Canary, way: str
) -> None:
    path = f"/proc/1/{way.format(pid=1)}"
    result = await sandbox.exec(f"ls {path}/; cat {path}{canary.secret}; ls {path}/../../tmp")
    assert canary.TEXT not in result.stdout
    assert os.path.basename(canary.folder) not in result.stdout


@pytest.mark.usefixtures("kernel_of_the_host")
async def test_no_process_of_the_engine_can_be_looked_into(sandbox: Sandbox) -> None:
    found = await run(
        sandbox,
        """
answers = {}
for pid in pids():
    if pid != os.getpid():
        for name in ("fd", "map_files"):
            answers[f"{pid} {name}"] = attempt(os.listdir, f"/proc/{pid}/{name}")
        for name in ("exe", "root", "cwd"):
            answers[f"{pid} {name}"] = attempt(os.readlink, f"/proc/{pid}/{name}")
        for name in ("environ", "maps", "mem", "auxv"):
            answers[f"{pid} {name}"] = attempt(read, f"/proc/{pid}/{name}")
        answers[f"{pid} PTRACE_ATTACH"] = ask("ptrace", 16, pid, 0, 0)
        answers[f"{pid} PTRACE_SEIZE"] = ask("ptrace", 0x4206, pid, 0, 0)
        buffer = ctypes.create_string_buffer(8)
        here = struct.pack("PN", ctypes.addressof(buffer), 8)
        there = struct.pack("PN", 4096, 8)
        answers[f"{pid} read"] = ask("process_vm_readv", pid, here, 1, there, 1, 0)
        answers[f"{pid} pidfd_getfd"] = ask("pidfd_getfd", os.pidfd_open(pid), 3, 0)
tell(answers)
""",
    )
    assert len(found) >= 10
    refusals = {"EACCES", "EPERM", "ENOENT", "ESRCH", "ENOSYS"}
    assert {what: answer for what, answer in found.items() if answer not in refusals} == {}


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
async def test_the_interpreter_of_the_host_cannot_be_had(
    sandbox: Sandbox, host: Host, program: str
) -> None:
    """CVE-2019-5736: whoever is started inside finds the host's file behind /proc/self/exe."""
    before = state_of(sys.executable)
    if program.startswith("-> "):
        await sandbox.files.symlink(program[3:], "/workspace/program")
    else:
        await sandbox.write_file("/workspace/program", program)
        await sandbox.files.chmod("/workspace/program", 0o755)
    await sandbox.write_file("/workspace/harm.py", HARM)
    for words in (["/workspace/program"], ["/workspace/program", "/workspace/harm.py"]):
        result = await sandbox.exec(words, timeout=10)
        assert os.path.dirname(os.path.realpath(sys.executable)) not in result.stdout
        assert "written" not in result.stdout
    assert state_of(sys.executable) == before
    await alive(await host.create("the-next"))


async def test_a_replaced_shell_runs_as_nothing_more(sandbox: Sandbox) -> None:
    before = state_of(sys.executable)
    await sandbox.exec(["rm", "-f", "/bin/bash"])
    if await sandbox.exists("/bin/bash"):
        pytest.skip("here the programs of the host are nobody's to replace")
    await sandbox.files.symlink("/proc/self/exe", "/bin/bash")
    await sandbox.exec(HARM, timeout=10)
    assert state_of(sys.executable) == before


async def test_commands_inherit_three_descriptors_and_no_file_of_the_host(
    sandbox: Sandbox, tier: str
) -> None:
    look = """
tell({name: os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")})
"""
    found = await run(sandbox, look)
    # And the one that the listing itself needs.
    assert set(found) == {"0", "1", "2", "3"}
    assert not any(os.path.isdir(path) for path in found.values() if not path.startswith("/proc"))
    if os.geteuid() == 0 and tier == "namespaces":
        first = await first_process(sandbox)
        for pid in (first, *_children(first)):
            links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            files = {link for link in links if link.startswith("/")}
            assert files == {"/dev/null"}


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


async def test_nothing_can_be_mounted_moved_or_uncovered(sandbox: Sandbox, tier: str) -> None:
    answers = await run(
        sandbox,
        """
os.makedirs("/tmp/place", exist_ok=True)
BIND, REMOUNT, MOVE, DETACH = 4096, 32, 8192, 2
answers = [
    ask("mount", b"/", b"/tmp/place", None, BIND, None),
    ask("mount", b"none", b"/tmp/place", b"tmpfs", 0, None),
    ask("mount", b"none", b"/tmp/place", b"proc", 0, None),
    ask("mount", b"none", b"/tmp/place", b"overlay", 0, b"lowerdir=/,upperdir=/tmp,workdir=/tmp"),
    ask("mount", None, b"/run/smokebox", None, BIND | REMOUNT, None),
    ask("mount", None, b"/proc/sys", None, BIND | REMOUNT, None),
    ask("mount", b"/proc/sys", b"/tmp/place", None, MOVE, None),
    *(ask("umount2", path, DETACH) for path in (b"/", b"/proc/keys", b"/proc/sys", b"/usr")),
    ask("pivot_root", b"/tmp", b"/tmp/place"),
    ask("open_tree", -100, b"/", 1),
    ask("fsopen", b"proc", 0),
    ask("fspick", -100, b"/", 0),
    ask("mount_setattr", -100, b"/run/smokebox", 0, bytes(32), 32),
    ask("open_by_handle_at", -100, struct.pack("=IiIII", 8, 1, 2, 0, 0), 0),
    ask("setns", 0, 0),
]
tell([answers, [ask("unshare", 0x20000), ask("unshare", 0x10000000)]])
""",
    )
    refused = {"EPERM", "ENOSYS", "EACCES", "EINVAL", "ENODEV", "EBADF", "ENOTSUP"}
    assert set(answers[0]) <= refused
    if tier == "namespaces":
        # gVisor gives namespaces of its own kernel to whoever asks.
        assert set(answers[1]) <= refused


async def test_above_the_root_there_is_the_root(sandbox: Sandbox, canary: Canary) -> None:
    """The way out of a chroot, which root inside may use, ends at the sandbox's own root."""
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
tell({"names": os.listdir("/"), "read": attempt(read, sys.argv[1])})
""",
        canary.secret,
    )
    assert "workspace" in found["names"]
    assert not {"merged", "low0", "data", "old_root"} & set(found["names"])
    assert found["read"] == "ENOENT"


async def test_device_nodes_are_refused_or_dead(sandbox: Sandbox, tier: str) -> None:
    answers = await run(
        sandbox,
        """
kinds = {"mem": (0o20666, 1, 1), "kmsg": (0o20666, 1, 11), "disk": (0o60666, 254, 0),
         "loop": (0o60666, 7, 0), "fuse": (0o20666, 10, 229), "kvm": (0o20666, 10, 232)}
answers = {}
for name, (mode, major, minor) in kinds.items():
    for folder in ("/workspace", "/dev", "/dev/shm", "/tmp"):
        path = f"{folder}/{name}"
        answers[path] = attempt(os.mknod, path, mode, os.makedev(major, minor))
        if answers[path] == "done":
            answers[path] = attempt(os.open, path, os.O_RDWR)
tell([answers, sorted(os.listdir("/dev"))])
""",
    )
    nodes, names = answers
    if tier == "gvisor":
        # Its kernel has one device of these, its own; what else was made in its own /dev is dead.
        nodes = {path: said for path, said in nodes.items() if not path.endswith("/fuse")}
        names = set(names) - {path.rpartition("/")[2] for path in answers[0]}
    assert set(nodes.values()) <= {"EPERM", "EACCES", "ENXIO", "ENODEV"}
    known = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero console"
    assert set(names) <= set(known.split())


async def test_layers_of_the_image_are_the_sandboxs_own_to_ruin(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    target = os.path.realpath(shutil.which("env") or "")
    before = state_of(target), sorted(os.listdir("/usr")), sorted(os.listdir("/usr/bin"))
    await sandbox.exec(
        f"echo broken > {target}; chmod 4777 /usr/bin/id; rm -rf /usr/share/doc/a*; touch /usr/mine"
        f" /usr/bin/mine; ln {target} /workspace/env; chown -R 1000 /etc; rm -f /etc/passwd"
    )
    if os.geteuid() == 0:
        assert (await sandbox.exec(["cat", target])).stdout == "broken\n"
    assert (state_of(target), sorted(os.listdir("/usr")), sorted(os.listdir("/usr/bin"))) == before
    assert (await neighbour.exec([target, "true"])).exit_code == 0
    assert (await neighbour.exec(["ls", "/usr/mine"])).exit_code != 0
    assert await run(neighbour, "tell(os.stat('/etc/passwd').st_uid)") == 0


async def test_the_engines_directory_is_read_only(
    sandbox: Sandbox, tier: str, tmp_path: Path
) -> None:
    await sandbox.create_session()
    [pipes] = (tmp_path / "home" / "boxes").glob("*/run/io")
    before = {str(path): state_of(str(path)) for path in (pipes, *pipes.iterdir())}
    answers = await run(
        sandbox,
        """
where = "/run/smokebox"
names = [f"{where}/{name}" for name in os.listdir(where)] if os.access(where, os.R_OK) else []
answers = [attempt(write, f"{where}/made", ""), attempt(os.mkdir, f"{where}/made"),
           attempt(os.chmod, where, 0o777), attempt(os.chown, where, 0, 0),
           attempt(os.symlink, "/", f"{where}/link"), attempt(os.rename, where, "/run/away"),
           attempt(os.link, "/etc/passwd", f"{where}/hard"), attempt(os.rmdir, where)]
for name in names:
    answers += [attempt(os.rename, name, f"{name}.away"), attempt(os.chmod, name, 0o777),
                attempt(os.utime, name, (0, 0)), attempt(os.setxattr, name, "user.x", b"y")]
tell(answers)
""",
    )
    if tier == "namespaces":
        # gVisor says of some that they were done, and does not do them.
        assert set(answers) <= {"EROFS", "EBUSY", "EPERM", "EXDEV", "EACCES", "EEXIST"}
    assert {str(path): state_of(str(path)) for path in (pipes, *pipes.iterdir())} == before


async def test_marks_of_the_overlay_cannot_be_forged(sandbox: Sandbox, canary: Canary) -> None:
    """Attributes by which an overlay finds what lies below, set from above and read anew."""
    answers = await run(
        sandbox,
        """
os.mkdir("/workspace/d")
answers = []
for space in ("user", "trusted"):
    for name, value in (("redirect", sys.argv[1].encode()), ("opaque", b"y"), ("metacopy", b""),
                        ("origin", bytes(29)), ("whiteout", b""), ("data", sys.argv[1].encode())):
        answers.append(attempt(os.setxattr, "/workspace/d", f"{space}.overlay.{name}", value))
answers.append(attempt(os.mknod, "/workspace/white", 0o20000, os.makedev(0, 0)))
tell(answers)
""",
        str(canary.folder),
    )
    assert len(answers) == 13
    await sandbox.sleep()
    assert (await sandbox.exec("ls -A /workspace/d")).stdout == ""
    assert (
        "secret" not in (await sandbox.exec("find /workspace /etc /run /tmp -name secret")).stdout
    )
    assert canary.unharmed


async def test_setuid_programs_give_nothing(sandbox: Sandbox, tier: str) -> None:
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


async def test_file_capabilities_give_nothing(sandbox: Sandbox) -> None:
    answers = await run(
        sandbox,
        r"""
write("/workspace/tool", "")
# VFS_CAP_REVISION_2 with every capability permitted and effective.
every = struct.pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0)
tell(attempt(os.setxattr, "/workspace/tool", "security.capability", every))
""",
    )
    assert answers in ("EPERM", "ENOTSUP", "EINVAL")


@pytest.mark.parametrize("planted", ["symlink to {folder}", "file", "symlink to /proc", "nothing"])
async def test_what_lies_where_the_engine_mounts_is_not_followed(
    sandbox: Sandbox, canary: Canary, tier: str, planted: str
) -> None:
    """CVE-2021-30465: a link of the sandbox's, followed while its root is being built."""
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
    await alive(sandbox)
    assert canary.unharmed
    for path in ("/dev/null", "/proc/1/status", "/run/smokebox"):
        assert (await sandbox.exec(["test", "-e", path])).exit_code == 0


def _uppers(home: Path) -> list[str]:
    """What sandboxes wrote to their roots, as it lies on the host."""
    return [str(path) for path in home.glob("home/boxes/*/data/upper/0")]


@pytest.mark.parametrize("name", ["hosts", "hostname"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/run/smokebox", "missing/directory"])
async def test_what_lies_where_the_engine_writes_does_not_hold_it(
    sandbox: Sandbox, host: Host, name: str, kind: str
) -> None:
    make = f"mkfifo /etc/{name}" if kind == "fifo" else f"ln -s {kind} /etc/{name}"
    await sandbox.exec(f"rm /etc/{name}; {make}")
    await sandbox.sleep()
    await alive(sandbox)


async def test_files_of_a_sandbox_have_natural_owners_on_disk(
    sandbox: Sandbox, canary: Canary, tier: str
) -> None:
    """What is copied out of a state directory belongs to whom it did inside."""
    await sandbox.exec("echo mine > /workspace/file; chmod 4755 /workspace/file")
    paths = [os.path.join(top, "workspace/file") for top in _uppers(canary.folder.parent)]
    found = os.stat(next(path for path in paths if os.path.exists(path)))
    assert found.st_uid == os.geteuid()
    assert stat.S_IMODE(canary.folder.parent.joinpath("home").stat().st_mode) & 0o007 == 0
