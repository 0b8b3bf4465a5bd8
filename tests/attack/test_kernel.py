"""Attacks on the host's kernel and processes: system calls, capabilities, settings, signals."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from attack.sandbox_code import check_alive, guest_init_pid, run
from smokebox.errors import SandboxGone

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

CAPABILITIES = 0x404FB  # Those of docs/isolation.md.


async def test_root_cannot_gain_capabilities(sandbox: Sandbox) -> None:
    found = await run(
        sandbox,
        r"""
lines = read("/proc/self/status").splitlines()
status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
header = struct.pack("=Ii", 0x20080522, 0)
everything = struct.pack("=6I", *[0xFFFFFFFF] * 6)
raised = [syscall("capset", header, everything)]
raised += [syscall("prctl", 47, 2, 21, 0, 0), syscall("prctl", 38, 0, 0, 0, 0)]
names = ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")
output([status.get(name, "0") for name in names] + raised)
""",
    )
    sets = [int(mask, 16) for mask in found[:5]]
    assert sets == [CAPABILITIES, CAPABILITIES, CAPABILITIES, 0, 0]
    assert set(found[5:]) <= {"EPERM", "EINVAL"}


async def test_every_process_is_filtered(sandbox: Sandbox, tier: str) -> None:
    statuses = await run(
        sandbox,
        r"""
found = {}
for pid in pids():
    lines = read(f"/proc/{pid}/status").splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    found[pid] = [fields.get("NoNewPrivs"), fields.get("Seccomp"), int(fields["CapEff"], 16)]
output(found)
""",
    )
    assert len(statuses) >= 3
    for no_new_privileges, seccomp, capabilities in statuses.values():
        assert capabilities & ~CAPABILITIES == 0
        # gVisor has neither for processes inside: its kernel process is filtered.
        if tier == "namespaces":
            assert (no_new_privileges, seccomp) == ("1", "2")


@pytest.mark.parametrize("user", [None, "nobody"])
async def test_dangerous_system_calls_are_refused(
    sandbox: Sandbox, tier: str, user: str | None
) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("an engine without root has one user id")
    results = await run(
        sandbox,
        r"""
path = b"/workspace/nothing"
calls = dict(
    reboot=(0xFEE1DEAD, 672274793, 0xCDEF0123, 0), kexec_load=(0, 0, 0, 0),
    kexec_file_load=(-1, -1, 0, None, 0), init_module=(path, 1, b""), finit_module=(0, b"", 0),
    delete_module=(b"loop", 0), bpf=(0, bytes(128), 128),
    perf_event_open=(bytes(128), 0, -1, -1, 0), userfaultfd=(0,),
    io_uring_setup=(8, bytes(120)), keyctl=(0, -3, 1), add_key=(b"user", b"x", b"y", 1, -3),
    request_key=(b"user", b"x", None, 0), swapon=(path, 0), swapoff=(path,), acct=(path,),
    quotactl=(0x800002 << 8, b"/dev/vda", 0, None), settimeofday=(bytes(16), None),
    clock_settime=(0, bytes(16)), sethostname=(b"evil", 4), setdomainname=(b"evil", 4),
    syslog=(3, bytes(4096), 4096), vhangup=(), unshare=(0x7E020000,), setns=(0, 0),
    fanotify_init=(0, 0), lookup_dcookie=(0, bytes(8), 8), move_pages=(1, 0, None, None, None, 0),
    kcmp=(1, 1, 0, 0, 0), mount=(b"x", b"/tmp", b"tmpfs", 0, None), umount2=(b"/proc", 2),
    open_by_handle_at=(-100, bytes(16), 0), personality=(0x0400000,), chroot=(b"/",),
)
if os.getuid() == 0:
    del calls["chroot"]
output({name: syscall(name, *args) for name, args in calls.items() if name in NUMBERS})
""",
        user=user,
    )
    refused = {"EPERM", "ENOSYS", "EACCES"}
    if tier == "gvisor":
        # Allowed in the gVisor kernel. The other errnos mean that it lacks the call.
        for name in ("unshare", "chroot", "personality", "io_uring_setup", "syslog"):
            results.pop(name, None)
        refused |= {"ENODEV", "ENOTSUP", "EINVAL"}
    assert {name: result for name, result in results.items() if result not in refused} == {}
    assert os.uname().nodename != "evil"
    assert time.time() > 1e9


@pytest.mark.usefixtures("host_kernel")
async def test_namespaces_cannot_be_created_or_entered(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
results = []
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80):
    results.append(syscall("unshare", flag))
    if flag != 0x80:
        results.append(syscall("clone", flag | 17, 0, 0, 0, 0))
        results.append(syscall("clone", flag | 17 | 1 << 40, 0, 0, 0, 0))
    results.append(syscall("clone3", struct.pack("=11Q", flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88))
for name in os.listdir("/proc/self/ns"):
    fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    results.append(syscall("setns", fd, 0))
    # NS_GET_USERNS and NS_GET_PARENT: the namespaces above.
    results.append(syscall("ioctl", fd, 0xB702, 0) if name in ("user", "pid") else "EPERM")
    results.append(syscall("ioctl", fd, 0xB701, 0) if name == "user" else "EPERM")
results.append(syscall("setns", os.pidfd_open(1), 0x10000000))
output(results)
""",
    )
    assert set(results) <= {"EPERM", "ENOSYS", "EINVAL", "ENOTTY"}


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="these entry points exist on x86-64 only"
)
@pytest.mark.parametrize(
    "code", [bytes.fromhex("b81a000000cd80c3"), bytes.fromhex("b814000040 0f05 c3")]
)
async def test_other_system_call_entry_points_are_refused(
    sandbox: Sandbox, tier: str, code: bytes
) -> None:
    """`int 0x80` and x32, which a filter by 64-bit numbers does not see."""
    result = await sandbox.exec(
        [
            "python3",
            "-c",
            "import ctypes, mmap, sys\n"
            "page = mmap.mmap(-1, 4096, prot=7)\n"
            "page.write(bytes.fromhex(sys.argv[1]))\n"
            "at = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
            "print(ctypes.CFUNCTYPE(ctypes.c_long)(at)())",
            code.hex(),
        ],
        timeout=10,
    )
    assert result.exit_code > 128 or int(result.stdout) < 0


async def test_kernel_settings_are_read_only(sandbox: Sandbox, tier: str) -> None:
    before = _settings()
    results = await run(
        sandbox,
        r"""
results = {}
names = ["/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/proc/self/uid_map", "/proc/self/gid_map",
         "/proc/irq/default_smp_affinity", "/proc/self/timens_offsets", "/proc/mtrr"]
for folder, _, files in os.walk("/proc/sys"):
    names += (os.path.join(folder, name) for name in files)
for name in names:
    try:
        text = read(name)
    except OSError:
        text = "1"
    if os.path.exists(name):
        results[name] = attempt(write, name, text)
written = {name for name, result in results.items() if result == "done"}
for name in sorted(written):
    attempt(write, name, "-1000\n" if "oom" in name else "1\n")
output([len(results), sorted(written)])
""",
    )
    if tier == "namespaces":
        assert results[0] > 20
        assert set(results[1]) <= {"/proc/sysrq-trigger"}  # /dev/null, where it is covered.
    assert _settings() == before


def _settings() -> dict[str, str]:
    """Return settings of the host that an attacker would change."""
    names = ("core_pattern", "hostname", "shmmax", "sem", "yama/ptrace_scope", "randomize_va_space")
    paths = [Path("/proc/sys/kernel", name) for name in names]
    paths += [Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/vm/overcommit_memory")]
    return {str(path): path.read_text() for path in paths if path.exists()}


async def test_files_about_the_host_are_empty_or_closed(sandbox: Sandbox, tier: str) -> None:
    found = await run(
        sandbox,
        r"""
def size(path):
    try:
        with open(path, "rb") as file:
            return len(file.read(1 << 16))
    except OSError as error:
        return errno.errorcode[error.errno]

names = ("kcore", "kmsg", "keys", "timer_list", "sched_debug", "latency_stats", "interrupts",
         "vmallocinfo", "slabinfo", "pagetypeinfo", "kpagecount", "kpageflags", "sysrq-trigger")
table = read("/proc/kallsyms") if os.path.exists("/proc/kallsyms") else ""
symbols = {line.split()[0] for line in table.splitlines()}
places = [os.path.exists(f"/sys/{name}") for name in ("kernel", "fs/cgroup", "firmware")]
output([{name: size(f"/proc/{name}") for name in names}, sorted(symbols), *places])
""",
    )
    closed = {0, "EACCES", "EPERM", "ENOENT", "EIO", "EINVAL"}
    assert {name: result for name, result in found[0].items() if result not in closed} == {}
    assert set("".join(found[1])) <= {"0"}
    if tier == "namespaces":
        # gVisor has its own /sys.
        assert found[2:] == [False, False, False]


# Of these, the host's values are readable by every user of it.
HOST_FILES = (
    *("bootconfig", "cgroups", "cmdline", "config.gz", "consoles", "diskstats", "iomem", "ioports"),
    *("kallsyms", "key-users", "keys", "locks", "mdstat", "modules", "partitions", "sched_debug"),
    *("schedstat", "swaps", "timer_list", "version_signature", "sys/kernel/random/boot_id"),
)


@pytest.mark.parametrize("user", [None, "nobody"])
async def test_values_of_the_host_are_hidden(
    sandbox: Sandbox, neighbour: Sandbox, tier: str, user: str | None
) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("an engine without root has one user id")
    code = """
texts = {}
for name in sys.argv[1:]:
    try:
        texts[name] = open(f"/proc/{name}", "rb").read().hex()
    except OSError:
        texts[name] = ""
paths = [f"/proc/{name}" for name in ("acpi", "asound", "bus", "driver", "fs", "irq", "scsi")]
output([texts, {path: os.listdir(path) for path in paths if os.path.exists(path)}])
"""
    texts, directories = await run(sandbox, code, *HOST_FILES, user=user)
    for name in HOST_FILES:
        with contextlib.suppress(OSError):
            host = Path("/proc", name).read_bytes().hex()
            assert not host or texts[name] != host, name
    if tier == "namespaces":
        boot_id = bytes.fromhex(texts.pop("sys/kernel/random/boot_id")).decode()
        assert UUID(boot_id.strip()).version == 4
        assert set(texts.values()) == {""}
        assert not any(directories.values())
        again, _ = await run(sandbox, code, "sys/kernel/random/boot_id")
        other, _ = await run(neighbour, code, "sys/kernel/random/boot_id")
        assert bytes.fromhex(again.popitem()[1]).decode() == boot_id
        assert bytes.fromhex(other.popitem()[1]).decode() != boot_id


@pytest.mark.usefixtures("host_kernel")
async def test_covers_of_proc_cannot_be_removed(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
boot_id = "/proc/sys/kernel/random/boot_id"
output([syscall("umount2", b"/proc/cmdline", 2), syscall("umount2", boot_id.encode(), 2),
        attempt(write, boot_id, "x"), attempt(os.chmod, boot_id, 0o777),
        attempt(os.utime, boot_id), attempt(os.rename, "/proc/cmdline", "/proc/x")])
""",
    )
    assert set(results) <= {"EPERM", "EROFS", "EBUSY", "EXDEV", "EACCES", "ENOENT"}


async def test_signals_stay_in_the_sandbox(sandbox: Sandbox, neighbour: Sandbox, tier: str) -> None:
    other_pid = await guest_init_pid(neighbour)
    for command in (
        "trap '' TERM INT HUP; kill -TERM -1; kill -HUP 1; kill -INT 1; kill -USR1 1",
        f"kill -9 {other_pid} {os.getpid()} {os.getppid()}; kill -9 -{os.getpgrp()}",
        "kill -KILL 1; kill -STOP 1; kill -SEGV 1; kill -ABRT 1",
    ):
        # A command that kills its supervisor fails.
        with contextlib.suppress(SandboxGone):
            await sandbox.exec(command + "; true", timeout=10)
    await check_alive(sandbox)
    await check_alive(neighbour)
    assert await guest_init_pid(neighbour) == other_pid
    if tier == "namespaces":
        # gVisor does not protect pid 1: the sandbox ends, and restarts.
        assert (await sandbox.info() or pytest.fail()).generation == 1


async def test_pids_of_the_host_are_unknown_inside(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
host = [int(word) for word in sys.argv[1:]]
known = set(pids())
output([attempt(os.kill, pid, 0) for pid in host if pid not in known]
     + [attempt(os.pidfd_open, pid) for pid in host if pid not in known]
     + [syscall("ptrace", 16, pid, 0, 0) for pid in host if pid not in known]
     + [os.getppid() in known])
""",
        *(str(pid) for pid in (os.getpid(), os.getppid(), 2, await guest_init_pid(sandbox))),
    )
    assert set(results[:-1]) <= {"ESRCH", "ENOSYS"}
    assert results[-1] is True


async def test_no_process_outlives_the_sandbox(sandbox: Sandbox) -> None:
    """Double forks in new sessions that ignore signals."""
    await sandbox.exec(
        "for i in 1 2 3; do (trap '' TERM INT HUP QUIT; setsid sh -c 'trap \"\" TERM HUP;"
        " setsid sleep 987654 & sleep 987654' >/dev/null 2>&1 &); done"
    )
    await sandbox.destroy()
    until = time.monotonic() + 5
    while _running("987654") and time.monotonic() < until:
        time.sleep(0.05)
    assert _running("987654") == []


def _running(word: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if b"\0" + word.encode() in line:
                found.append(int(name))
    return found
