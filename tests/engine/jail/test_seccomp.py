"""The system-call filter: in child processes of this kernel, and as a program for each machine."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from smokebox.engine.jail.seccomp import allowed, install, numbers, profile
from smokebox.errors import IsolationUnavailable

MACHINES = ("x86_64", "aarch64")
MACHINE = os.uname().machine
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
X32 = 0x40000000
HIGH_BITS = 0xDEAD << 32
CONDITIONAL = {"clone", "clone3", "ioctl", "personality", "socket", "socketpair"}

# System calls that reach beyond a jail.
_FORBIDDEN = """
    mount umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr
    unshare setns bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
    keyctl add_key request_key kexec_load kexec_file_load init_module finit_module delete_module
    open_by_handle_at quotactl quotactl_fd reboot swapon swapoff settimeofday clock_settime acct
    syslog sethostname setdomainname vhangup fanotify_init lookup_dcookie nfsservctl
    pidfd_getfd kcmp process_madvise mbind set_mempolicy migrate_pages move_pages
    lsm_get_self_attr lsm_set_self_attr lsm_list_modules
"""
FORBIDDEN = set(_FORBIDDEN.split())

# Precedes the code of a child process.
PRELUDE = """
import ctypes, errno, json, os, sys
from smokebox.engine.jail.seccomp import install, profile
from smokebox.engine.jail.seccomp import numbers
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
number = numbers(os.uname().machine)

def call(name, *args):
    "Return the errno of a system call, 0 for success."
    nr = number[name] if isinstance(name, str) else name
    ctypes.set_errno(0)
    failed = libc.syscall(ctypes.c_long(nr), *map(ctypes.c_ulong, args)) == -1
    return ctypes.get_errno() if failed else 0

def output(value):
    print(json.dumps(value))

PR_SET_NO_NEW_PRIVS = 38
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
"""


def run(code: str, *args: str, filtered: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python code under the filter, without a terminal that it could harm."""
    script = PRELUDE + ("install(profile())\n" if filtered else "") + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=15,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


def output_of(code: str, *args: str) -> object:
    """Run Python code under the filter, and return what it passes to `output`."""
    done = run(code, *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program under the filter."""
    return run("os.execvp(sys.argv[1], sys.argv[1:])", *argv)


class TestAllowed:
    def test_pipeline_with_background_job(self) -> None:
        done = command(
            "bash", "-c", "sleep 0.01 & printf 'b\\na\\n' | sort | tr a-z A-Z; wait; ulimit"
        )
        assert done.stdout.startswith("A\nB\n"), done.stderr

    def test_python_with_threads_subprocesses_and_asyncio(self) -> None:
        done = command(sys.executable, "-c", BUSY)
        assert (done.stdout, done.stderr) == ("[0, 1, 4, 9] [0, 1, 4, 9] hi\n", "")

    @pytest.mark.parametrize(
        "argv",
        [
            ["git", "--version"],
            ["curl", "--version"],
            ["node", "-e", "require('child_process').execSync('true'); setTimeout(() => {}, 1)"],
            ["gdb", "--version"],
            ["perl", "-e", "fork() or exit; wait"],
            ["ip", "address"],
            ["ps", "ax"],
        ],
        ids=lambda argv: argv[0],
    )
    def test_tool(self, argv: list[str]) -> None:
        if shutil.which(argv[0]) is None:
            pytest.skip(f"{argv[0]} is not installed")
        done = command(*argv)
        assert done.returncode == 0, done.stderr

    def test_repository_and_archive(self, tmp_path: Path) -> None:
        script = """
            set -e; cd "$1"; git init -q .; echo hi > file; git add file
            git -c user.name=n -c user.email=e@x commit -q -m m
            mkdir out; tar cf - file | tar xf - -C out; chmod 600 out/file; cp -a out copy
            mkfifo pipe; ln -s file link; cat copy/file
        """
        done = command("bash", "-c", script, "bash", str(tmp_path))
        assert (done.stdout, done.stderr) == ("hi\n", "")

    def test_server_and_client_of_each_address_family(self) -> None:
        results = output_of("""
            import socket
            results = []
            for family, address in (
                (socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, ""),
            ):
                with socket.socket(family) as server, socket.socket(family) as client:
                    server.bind(address); server.listen()
                    client.connect(server.getsockname())
                    server.accept()[0].send(b"x")
                    results.append(client.recv(1).decode())
            left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            left.send(b"y"); results.append(right.recv(1).decode())
            results.append(socket.getaddrinfo("127.0.0.1", 80)[0][4][1])
            results.append(bool(socket.if_nameindex()))
            output(results)
        """)
        assert results == ["x", "x", "y", 80, True]

    def test_debugger_can_trace_its_child(self) -> None:
        results = output_of("""
            PTRACE_TRACEME, PTRACE_CONT = 0, 7
            if (pid := os.fork()) == 0:
                os._exit(call("ptrace", PTRACE_TRACEME, 0, 0, 0) or os.kill(os.getpid(), 19) or 7)
            stopped = os.WIFSTOPPED(os.waitpid(pid, 0)[1])
            continued = call("ptrace", PTRACE_CONT, pid, 0, 0)
            output([stopped, continued, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
        """)
        assert results == [True, 0, 7]


BUSY = """
import asyncio, concurrent.futures, subprocess
from multiprocessing import Pool
def square(n): return n * n
with concurrent.futures.ThreadPoolExecutor(4) as threads:
    first = list(threads.map(square, range(4)))
with Pool(2) as pool:
    second = pool.map(square, range(4))
async def main():
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode().strip()
print(first, second, asyncio.run(main()))
"""


class TestRefused:
    def test_unlisted_system_calls_fail_with_eperm(self) -> None:
        """All arguments are -1, which is invalid for every call, should one get through."""
        names = sorted(set(numbers(MACHINE)) - allowed() - CONDITIONAL)
        results = output_of("output([call(name, *[-1] * 6) for name in sys.argv[1:]])", *names)
        assert isinstance(results, list)
        got = dict(zip(names, results, strict=True))
        assert {name: code for name, code in got.items() if code != errno.EPERM} == {}
        assert FORBIDDEN & set(numbers(MACHINE)) <= set(got)

    @pytest.mark.parametrize(
        ("attempt", "code"),
        [
            ("'mount', 0, 0, 0, 0, 0", errno.EPERM),
            ("'unshare', 0x10000000", errno.EPERM),
            ("'unshare', 0x20000", errno.EPERM),
            ("'setns', os.open('/proc/self/ns/mnt', os.O_RDONLY), 0", errno.EPERM),
            ("'keyctl', 0, -3, 1", errno.EPERM),
            ("'bpf', 0, 0, 0", errno.EPERM),
            ("'userfaultfd', 1", errno.EPERM),
            ("'io_uring_setup', 8, 0", errno.EPERM),
            ("'perf_event_open', 0, 0, -1, -1, 0", errno.EPERM),
            ("'clone3', 0, 0", errno.ENOSYS),
            ("'clone', 0x10000000 | 17, 0, 0, 0, 0", errno.EPERM),
            ("'clone', 0x20000 | 17, 0, 0, 0, 0", errno.EPERM),
            ("'clone', 0x40000000 | 17 | 1 << 32, 0, 0, 0, 0", errno.EPERM),
            ("'personality', 0x0040000", errno.EPERM),
            ("'personality', 0x0400000", errno.EPERM),
            ("'personality', 0xFFFFFFFF", 0),
            ("'socket', 40, 1, 0", errno.EAFNOSUPPORT),
            ("'socket', 40 | 1 << 32, 1, 0", errno.EAFNOSUPPORT),
            ("'socket', 38, 5, 0", errno.EAFNOSUPPORT),
            ("'socket', 17, 3, 0", errno.EAFNOSUPPORT),
            ("'socketpair', 30, 1, 0, 0", errno.EAFNOSUPPORT),
            ("'socket', 2, 10, 0x300", errno.ESOCKTNOSUPPORT),
            ("'socket', 2, 10 | 0x80000, 0x300", errno.ESOCKTNOSUPPORT),
            ("'socket', 2, 6, 33", errno.ESOCKTNOSUPPORT),
            ("'socket', 2, 1, 132", errno.EPROTONOSUPPORT),
            ("'socket', 16, 3, 12", errno.EPROTONOSUPPORT),
            ("'socket', 16, 3 | 0x80000, 0", 0),
            ("'socket', 10, 2 | 0x80800, 17", 0),
            ("X32 | number['getpid']", errno.ENOSYS),
            ("X32 | number['unshare'], 0x10000000", errno.ENOSYS),
            ("max(number.values()) + 1", errno.ENOSYS),
            ("1000", errno.ENOSYS),
            ("-1", errno.ENOSYS),
        ],
    )
    def test_system_call_result(self, attempt: str, code: int) -> None:
        result = output_of(f"X32 = {X32}\noutput(call({attempt}))")
        assert result == code, f"{attempt} returned {result}"

    @pytest.mark.parametrize("request_number", [0x5412, 0x541C, 0x5423, 0x5412 | HIGH_BITS])
    def test_input_cannot_be_injected_into_terminal(self, request_number: int) -> None:
        results = output_of(
            """
            import fcntl, pty, termios
            host, inside = pty.openpty()
            fcntl.ioctl(inside, termios.TIOCSCTTY, 0)
            letter = ctypes.create_string_buffer(b"x")
            address = ctypes.addressof(letter)
            attempt = call("ioctl", inside, int(sys.argv[1]), address)
            window = call("ioctl", inside, termios.TIOCGWINSZ, ctypes.addressof(
                ctypes.create_string_buffer(8)))
            output([attempt, window])
            """,
            str(request_number),
        )
        assert results == [errno.EPERM, 0]

    @pytest.mark.skipif(MACHINE != "x86_64", reason="int 0x80 exists on x86 only")
    def test_32_bit_system_call_kills(self) -> None:
        through_int_80 = """
            import mmap
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, getpid; int 0x80; ret
            start = ctypes.addressof(ctypes.c_char.from_buffer(page))
            output(ctypes.CFUNCTYPE(ctypes.c_int)(start)() == os.getpid())
        """
        if run(through_int_80, filtered=False).returncode != 0:
            pytest.skip("this kernel has no 32-bit calls")
        assert run(through_int_80).returncode == -signal.SIGSYS

    def test_filter_applies_to_child_processes(self) -> None:
        done = command("bash", "-c", "(setsid unshare -U true & wait $!); echo $?")
        assert done.stdout == "1\n"
        assert "Operation not permitted" in done.stderr

    def test_filter_applies_to_threads(self) -> None:
        result = output_of("""
            import threading
            results = []
            thread = threading.Thread(target=lambda: results.append(call("unshare", 0x10000000)))
            thread.start(); thread.join()
            output(results)
        """)
        assert result == [errno.EPERM]

    def test_additional_filter_cannot_allow_more(self) -> None:
        allow_all = struct.pack("=HBBI", 0x06, 0, 0, ALLOW)
        result = output_of(f"install({allow_all!r}); output(call('unshare', 0x10000000))")
        assert result == errno.EPERM

    @pytest.mark.skipif(MACHINE != "x86_64", reason="writes registers of x86_64")
    def test_tracer_cannot_replace_system_call_after_filter(self) -> None:
        """An allowed call is stopped at entry and changed into unshare(CLONE_NEWUSER)."""
        result = output_of("""
            TRACEME, POKEUSER, SYSCALL, DETACH = 0, 6, 24, 17
            ORIG_RAX, RDI = 15 * 8, 14 * 8
            if (pid := os.fork()) == 0:
                call("ptrace", TRACEME, 0, 0, 0)
                os.kill(os.getpid(), 19)
                os._exit(call("getppid"))
            os.waitpid(pid, 0)
            # Continue to the first stop at getppid.
            while True:
                call("ptrace", SYSCALL, pid, 0, 0)
                os.waitpid(pid, 0)
                with open(f"/proc/{pid}/syscall") as entered:
                    if entered.read().split()[0] == str(number["getppid"]):
                        break
            swapped = [
                call("ptrace", POKEUSER, pid, ORIG_RAX, number["unshare"]),
                call("ptrace", POKEUSER, pid, RDI, 0x10000000),
            ]
            call("ptrace", DETACH, pid, 0, 0)
            output([*swapped, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
        """)
        assert result == [0, 0, errno.EPERM]


class TestInstall:
    def test_install_needs_no_new_privs_without_privileges(self) -> None:
        code = """
            import os
            from smokebox.engine.jail.seccomp import install, profile
            program = profile()
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            try:
                install(program)
            except PermissionError as error:
                print(error)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
        )
        assert "the system-call filter was refused" in done.stdout, done.stderr

    def test_invalid_program_is_refused(self) -> None:
        with pytest.raises(OSError, match="filter was refused"):
            install(b"")

    def test_profile_is_cached(self) -> None:
        assert profile() is profile()

    def test_unknown_machine_is_named(self) -> None:
        with pytest.raises(IsolationUnavailable, match=r"'riscv64'.*aarch64, x86_64"):
            profile("riscv64")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCall:
    """A system call as a filter sees it."""

    number: int
    architecture: int
    args: tuple[int, ...] = ()

    def pack(self) -> bytes:
        words = [arg & 0xFFFFFFFFFFFFFFFF for arg in (*self.args, *[0] * 6)[:6]]
        return struct.pack("=IIQ6Q", self.number & 0xFFFFFFFF, self.architecture, 0, *words)


def decode(program: bytes) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("=HBBI", program))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterResult:
    """Verdict of a filter, and the number of instructions it took."""

    verdict: int
    steps: int


def run_filter(program: bytes, call: SystemCall) -> FilterResult:
    """Interpret classic BPF for a system call."""
    code, data, at, a = decode(program), call.pack(), 0, 0
    for steps in range(1, len(code) + 1):
        op, then, otherwise, k = code[at]
        at += 1
        match op:
            case 0x20:
                (a,) = struct.unpack_from("=I", data, k)
            case 0x54:
                a &= k
            case 0x15:
                at += then if a == k else otherwise
            case 0x35:
                at += then if a >= k else otherwise
            case 0x45:
                at += then if a & k else otherwise
            case 0x06:
                return FilterResult(verdict=k, steps=steps)
            case _:
                raise AssertionError(f"no such instruction: {op:#x}")
    raise AssertionError("the program does not end")


def verdict(machine: str, name: str | int, *args: int) -> int:
    """Return the verdict on a native system call."""
    number = numbers(machine)[name] if isinstance(name, str) else name
    call = SystemCall(number=number, architecture=ARCHITECTURE[machine], args=args)
    return run_filter(profile(machine), call).verdict


@pytest.mark.parametrize("machine", MACHINES)
class TestProgram:
    def test_program_is_valid_for_kernel(self, machine: str) -> None:
        """`bpf_check_classic` requires forward jumps inside the program, and a verdict last."""
        code = decode(profile(machine))
        assert len(code) < 4096
        assert code[-1][0] == 0x06
        for at, (op, then, otherwise, k) in enumerate(code[:-1]):
            assert at + 1 + max(then, otherwise) < len(code)
            assert op != 0x20 or (k % 4 == 0 and k < 64)

    def test_every_number_has_the_verdict_of_its_name(self, machine: str) -> None:
        names = {number: name for name, number in numbers(machine).items()}
        for number in range(600):
            name = names.get(number)
            if name in CONDITIONAL:
                continue
            expected = ERRNO | (errno.ENOSYS if name is None else errno.EPERM)
            if name in allowed():
                expected = ALLOW
            assert verdict(machine, number) == expected, (number, name)

    def test_search_is_short(self, machine: str) -> None:
        """The binary search takes at most 12 instructions for rules without arguments."""
        with_arguments = {numbers(machine)[name] for name in CONDITIONAL}
        for number in {*range(600), X32, 0xFFFFFFFF} - with_arguments:
            call = SystemCall(number=number, architecture=ARCHITECTURE[machine])
            assert run_filter(profile(machine), call).steps <= 12

    def test_forbidden_calls_are_not_allowed(self, machine: str) -> None:
        known = set(numbers(machine))
        assert not FORBIDDEN & allowed()
        for name in FORBIDDEN & known:
            assert verdict(machine, name) == ERRNO | errno.EPERM

    @pytest.mark.parametrize("number", [X32, X32 | 56, X32 | 520, 512, 547, 0x7FFFFFFF, 0xFFFFFFFF])
    def test_numbers_beyond_the_table_fail_with_enosys(self, machine: str, number: int) -> None:
        assert verdict(machine, number) == ERRNO | errno.ENOSYS

    @pytest.mark.parametrize("architecture", [0x40000003, 0x40000028, 0x800000B7, 0])
    def test_other_architectures_are_killed(self, machine: str, architecture: int) -> None:
        for number in range(600):
            call = SystemCall(number=number, architecture=architecture)
            assert run_filter(profile(machine), call).verdict == KILL

    def test_clone_allows_no_namespace_flags(self, machine: str) -> None:
        thread, vfork = 0x3D0F00, 0x4111
        for flags in (17, thread, vfork, 0x1200011):
            assert verdict(machine, "clone", flags) == ALLOW
        for bit in (17, 25, 26, 27, 28, 29, 30):
            for others in (0, 17, thread, HIGH_BITS):
                assert verdict(machine, "clone", 1 << bit | others) == ERRNO | errno.EPERM
        assert verdict(machine, "clone3", 0, 88) == ERRNO | errno.ENOSYS

    def test_sockets_have_four_families(self, machine: str) -> None:
        for call in ("socket", "socketpair"):
            for family in range(64):
                expected = ALLOW if family in {1, 2, 10, 16} else ERRNO | errno.EAFNOSUPPORT
                assert verdict(machine, call, family, 1, 0) == expected
                assert verdict(machine, call, family | HIGH_BITS, 1, 0) == expected

    def test_sockets_have_few_protocols(self, machine: str) -> None:
        flags = 0x80800
        for family, protocols in ((2, {0, 1, 6, 17, 58, 255}), (16, {0, 4, 15})):
            for protocol in range(300):
                expected = ALLOW if protocol in protocols else ERRNO | errno.EPROTONOSUPPORT
                assert verdict(machine, "socket", family, 3 | flags, protocol) == expected
        for kind in range(16):
            expected = ALLOW if kind in {1, 2, 3} else ERRNO | errno.ESOCKTNOSUPPORT
            assert verdict(machine, "socket", 10, kind | flags, 0) == expected
            assert verdict(machine, "socket", 1, kind | flags, 0) == ALLOW

    def test_personality_allows_only_defaults(self, machine: str) -> None:
        good = {0, 8, 0x20000, 0x20008, 0xFFFFFFFF}
        for value in [*good, *(1 << bit for bit in range(32))]:
            expected = ALLOW if value in good else ERRNO | errno.EPERM
            assert verdict(machine, "personality", value) == expected

    def test_only_terminal_injection_ioctls_are_refused(self, machine: str) -> None:
        for request in range(0x5400, 0x5500):
            expected = ERRNO | errno.EPERM if request in {0x5412, 0x541C, 0x5423} else ALLOW
            assert verdict(machine, "ioctl", 0, request) == expected
            assert verdict(machine, "ioctl", 0, request | HIGH_BITS) == expected


class TestTables:
    def test_allowed_names_are_system_calls(self) -> None:
        assert allowed() <= set(numbers("x86_64")) | set(numbers("aarch64"))
        assert not allowed() & CONDITIONAL

    @pytest.mark.parametrize("machine", MACHINES)
    def test_numbers_are_unique_and_sorted(self, machine: str) -> None:
        table = numbers(machine)
        assert len(set(table.values())) == len(table)
        assert list(table.values()) == sorted(table.values())

    def test_x86_64_numbers_match_kernel_headers(self) -> None:
        header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
        compare_with(header, r"#define __NR_(\w+) (\d+)", "x86_64")

    def test_aarch64_numbers_match_kernel_headers(self) -> None:
        header = Path("/usr/include/asm-generic/unistd.h")
        compare_with(header, r"#define __NR(?:3264)?_(\w+) (\d+)", "aarch64")


def compare_with(header: Path, pattern: str, machine: str) -> None:
    """Compare the table with a kernel header."""
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    theirs: dict[int, set[str]] = {}
    for name, number in re.findall(pattern, header.read_text()):
        # The first two are counts. `fstatat` is `newfstatat` in the kernel's table.
        if name not in {"syscalls", "arch_specific_syscall"}:
            theirs.setdefault(int(number), set()).add("newfstatat" if name == "fstatat" else name)
    ours = {number: name for name, number in numbers(machine).items()}
    both = ours.keys() & theirs.keys()
    assert {n: ours[n] for n in both if ours[n] not in theirs[n]} == {}
    # Some numbers are for 32-bit machines only; a header may be newer than the table.
    only_32_bit = range(403, 424)
    missing = theirs.keys() - both - set(only_32_bit)
    assert {n for n in missing if n <= max(ours)} == set()
