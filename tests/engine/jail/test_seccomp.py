"""What a filtered process can still do, what it cannot, and that both hold on paper too."""

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

# Everything that reaches beyond a jail, or that only somebody who wants to would call.
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

# Puts the process under the filter and then runs what follows it.
PRELUDE = """
import ctypes, errno, json, os, sys
from smokebox.engine.jail.seccomp import install, profile
from smokebox.engine.jail.seccomp import numbers
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
number = numbers(os.uname().machine)

def ask(name, *args):
    "The errno that a system call ends with, 0 for none."
    nr = number[name] if isinstance(name, str) else name
    ctypes.set_errno(0)
    failed = libc.syscall(ctypes.c_long(nr), *map(ctypes.c_ulong, args)) == -1
    return ctypes.get_errno() if failed else 0

def tell(answer):
    print(json.dumps(answer))

PR_SET_NO_NEW_PRIVS = 38
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
"""


def run(code: str, *args: str, filtered: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python below the filter, without a terminal that it could harm."""
    script = PRELUDE + ("install(profile())\n" if filtered else "") + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=15,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


def told(code: str, *args: str, filtered: bool = True) -> object:
    """What the Python below the filter has to tell."""
    done = run(code, *args, filtered=filtered)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program below the filter."""
    return run("os.execvp(sys.argv[1], sys.argv[1:])", *argv)


class TestOrdinaryLife:
    def test_a_pipeline_with_a_background_job(self) -> None:
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
    def test_a_tool(self, argv: list[str]) -> None:
        if shutil.which(argv[0]) is None:
            pytest.skip(f"{argv[0]} is not installed")
        done = command(*argv)
        assert done.returncode == 0, done.stderr

    def test_a_repository_and_an_archive(self, tmp_path: Path) -> None:
        script = """
            set -e; cd "$1"; git init -q .; echo hi > file; git add file
            git -c user.name=n -c user.email=e@x commit -q -m m
            mkdir out; tar cf - file | tar xf - -C out; chmod 600 out/file; cp -a out copy
            mkfifo pipe; ln -s file link; cat copy/file
        """
        done = command("bash", "-c", script, "bash", str(tmp_path))
        assert (done.stdout, done.stderr) == ("hi\n", "")

    def test_a_server_and_a_client_on_each_kind_of_address(self) -> None:
        answers = told("""
            import socket
            answers = []
            for family, address in (
                (socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, ""),
            ):
                with socket.socket(family) as server, socket.socket(family) as client:
                    server.bind(address); server.listen()
                    client.connect(server.getsockname())
                    server.accept()[0].send(b"x")
                    answers.append(client.recv(1).decode())
            left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            left.send(b"y"); answers.append(right.recv(1).decode())
            answers.append(socket.getaddrinfo("127.0.0.1", 80)[0][4][1])
            answers.append(bool(socket.if_nameindex()))
            tell(answers)
        """)
        assert answers == ["x", "x", "y", 80, True]

    def test_a_debugger_may_look_at_its_child(self) -> None:
        answers = told("""
            PTRACE_TRACEME, PTRACE_CONT = 0, 7
            if (pid := os.fork()) == 0:
                os._exit(ask("ptrace", PTRACE_TRACEME, 0, 0, 0) or os.kill(os.getpid(), 19) or 7)
            stopped = os.WIFSTOPPED(os.waitpid(pid, 0)[1])
            went_on = ask("ptrace", PTRACE_CONT, pid, 0, 0)
            tell([stopped, went_on, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
        """)
        assert answers == [True, 0, 7]


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
    def test_every_call_that_is_not_listed_answers_eperm(self) -> None:
        """All arguments are -1, which no call takes for good, should one get through."""
        names = sorted(set(numbers(MACHINE)) - allowed() - CONDITIONAL)
        answers = told("tell([ask(name, *[-1] * 6) for name in sys.argv[1:]])", *names)
        assert isinstance(answers, list)
        got = dict(zip(names, answers, strict=True))
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
    def test_attempt(self, attempt: str, code: int) -> None:
        answer = told(f"X32 = {X32}\ntell(ask({attempt}))")
        assert answer == code, f"{attempt} answered {answer}"

    @pytest.mark.parametrize("request_number", [0x5412, 0x541C, 0x5423, 0x5412 | HIGH_BITS])
    def test_nobody_types_into_a_terminal(self, request_number: int) -> None:
        answers = told(
            """
            import fcntl, pty, termios
            host, inside = pty.openpty()
            fcntl.ioctl(inside, termios.TIOCSCTTY, 0)
            letter = ctypes.create_string_buffer(b"x")
            address = ctypes.addressof(letter)
            attempt = ask("ioctl", inside, int(sys.argv[1]), address)
            window = ask("ioctl", inside, termios.TIOCGWINSZ, ctypes.addressof(
                ctypes.create_string_buffer(8)))
            tell([attempt, window])
            """,
            str(request_number),
        )
        assert answers == [errno.EPERM, 0]

    @pytest.mark.skipif(MACHINE != "x86_64", reason="int 0x80 is a door of x86 only")
    def test_the_door_of_32_bit_programs_kills(self) -> None:
        through_int_80 = """
            import mmap
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, getpid; int 0x80; ret
            start = ctypes.addressof(ctypes.c_char.from_buffer(page))
            tell(ctypes.CFUNCTYPE(ctypes.c_int)(start)() == os.getpid())
        """
        if run(through_int_80, filtered=False).returncode != 0:
            pytest.skip("this kernel has no 32-bit calls")
        assert run(through_int_80).returncode == -signal.SIGSYS

    def test_what_a_command_starts_is_refused_too(self) -> None:
        done = command("bash", "-c", "(setsid unshare -U true & wait $!); echo $?")
        assert done.stdout == "1\n"
        assert "Operation not permitted" in done.stderr

    def test_a_thread_is_refused_too(self) -> None:
        answer = told("""
            import threading
            answers = []
            thread = threading.Thread(target=lambda: answers.append(ask("unshare", 0x10000000)))
            thread.start(); thread.join()
            tell(answers)
        """)
        assert answer == [errno.EPERM]

    def test_a_filter_of_ones_own_gives_nothing_back(self) -> None:
        allow_all = struct.pack("=HBBI", 0x06, 0, 0, ALLOW)
        answer = told(f"install({allow_all!r}); tell(ask('unshare', 0x10000000))")
        assert answer == errno.EPERM

    @pytest.mark.skipif(MACHINE != "x86_64", reason="pokes the registers of x86_64")
    def test_a_tracer_cannot_swap_the_call_behind_the_filter(self) -> None:
        """getpid is let in, stopped at the door, and turned into unshare(CLONE_NEWUSER)."""
        answer = told("""
            TRACEME, POKEUSER, SYSCALL, DETACH = 0, 6, 24, 17
            ORIG_RAX, RDI = 15 * 8, 14 * 8
            if (pid := os.fork()) == 0:
                ask("ptrace", TRACEME, 0, 0, 0)
                os.kill(os.getpid(), 19)
                os._exit(ask("getppid"))
            os.waitpid(pid, 0)
            # The first stop at getppid: whatever was called before it goes by unharmed.
            while True:
                ask("ptrace", SYSCALL, pid, 0, 0)
                os.waitpid(pid, 0)
                with open(f"/proc/{pid}/syscall") as entered:
                    if entered.read().split()[0] == str(number["getppid"]):
                        break
            swapped = [
                ask("ptrace", POKEUSER, pid, ORIG_RAX, number["unshare"]),
                ask("ptrace", POKEUSER, pid, RDI, 0x10000000),
            ]
            ask("ptrace", DETACH, pid, 0, 0)
            tell([*swapped, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
        """)
        assert answer == [0, 0, errno.EPERM]


class TestInstall:
    def test_without_no_new_privs_it_is_refused_to_an_ordinary_user(self) -> None:
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

    def test_a_program_that_is_not_one_is_refused(self) -> None:
        with pytest.raises(OSError, match="filter was refused"):
            install(b"")

    def test_it_is_built_once(self) -> None:
        assert profile() is profile()

    def test_an_unknown_machine_is_named(self) -> None:
        with pytest.raises(IsolationUnavailable, match=r"'riscv64'.*aarch64, x86_64"):
            profile("riscv64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
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
class Ruling:
    """What a filter answers, and after how many instructions."""

    verdict: int
    steps: int


def rule(program: bytes, call: Call) -> Ruling:
    """What classic BPF makes of `call`."""
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
                return Ruling(verdict=k, steps=steps)
            case _:
                raise AssertionError(f"no such instruction: {op:#x}")
    raise AssertionError("it goes round in circles")


def judge(machine: str, name: str | int, *args: int) -> int:
    """The verdict on a native call."""
    number = numbers(machine)[name] if isinstance(name, str) else name
    call = Call(number=number, architecture=ARCHITECTURE[machine], args=args)
    return rule(profile(machine), call).verdict


@pytest.mark.parametrize("machine", MACHINES)
class TestProgram:
    def test_it_is_one_the_kernel_takes(self, machine: str) -> None:
        """As `bpf_check_classic` has it: forward jumps that stay inside, and a verdict last."""
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
            assert judge(machine, number) == expected, (number, name)

    def test_the_search_is_short(self, machine: str) -> None:
        """It halves: a call that needs no look at its arguments costs 12 instructions at most."""
        looked_at = {numbers(machine)[name] for name in CONDITIONAL}
        for number in {*range(600), X32, 0xFFFFFFFF} - looked_at:
            call = Call(number=number, architecture=ARCHITECTURE[machine])
            assert rule(profile(machine), call).steps <= 12

    def test_what_is_forbidden_is_on_no_list(self, machine: str) -> None:
        known = set(numbers(machine))
        assert not FORBIDDEN & allowed()
        for name in FORBIDDEN & known:
            assert judge(machine, name) == ERRNO | errno.EPERM

    @pytest.mark.parametrize("number", [X32, X32 | 56, X32 | 520, 512, 547, 0x7FFFFFFF, 0xFFFFFFFF])
    def test_numbers_beyond_the_table_do_not_exist(self, machine: str, number: int) -> None:
        assert judge(machine, number) == ERRNO | errno.ENOSYS

    @pytest.mark.parametrize("architecture", [0x40000003, 0x40000028, 0x800000B7, 0])
    def test_other_architectures_are_killed(self, machine: str, architecture: int) -> None:
        for number in range(600):
            call = Call(number=number, architecture=architecture)
            assert rule(profile(machine), call).verdict == KILL

    def test_clone_makes_threads_and_processes_but_no_namespace(self, machine: str) -> None:
        thread, vfork = 0x3D0F00, 0x4111
        for flags in (17, thread, vfork, 0x1200011):
            assert judge(machine, "clone", flags) == ALLOW
        for bit in (17, 25, 26, 27, 28, 29, 30):
            for others in (0, 17, thread, HIGH_BITS):
                assert judge(machine, "clone", 1 << bit | others) == ERRNO | errno.EPERM
        assert judge(machine, "clone3", 0, 88) == ERRNO | errno.ENOSYS

    def test_sockets_are_of_four_families(self, machine: str) -> None:
        for call in ("socket", "socketpair"):
            for family in range(64):
                expected = ALLOW if family in {1, 2, 10, 16} else ERRNO | errno.EAFNOSUPPORT
                assert judge(machine, call, family, 1, 0) == expected
                assert judge(machine, call, family | HIGH_BITS, 1, 0) == expected

    def test_sockets_are_of_few_protocols(self, machine: str) -> None:
        flags = 0x80800
        for family, protocols in ((2, {0, 1, 6, 17, 58, 255}), (16, {0, 4, 15})):
            for protocol in range(300):
                expected = ALLOW if protocol in protocols else ERRNO | errno.EPROTONOSUPPORT
                assert judge(machine, "socket", family, 3 | flags, protocol) == expected
        for kind in range(16):
            expected = ALLOW if kind in {1, 2, 3} else ERRNO | errno.ESOCKTNOSUPPORT
            assert judge(machine, "socket", 10, kind | flags, 0) == expected
            assert judge(machine, "socket", 1, kind | flags, 0) == ALLOW

    def test_personality_is_the_default_one(self, machine: str) -> None:
        good = {0, 8, 0x20000, 0x20008, 0xFFFFFFFF}
        for value in [*good, *(1 << bit for bit in range(32))]:
            expected = ALLOW if value in good else ERRNO | errno.EPERM
            assert judge(machine, "personality", value) == expected

    def test_terminal_tricks_are_the_only_ioctls_refused(self, machine: str) -> None:
        for request in range(0x5400, 0x5500):
            expected = ERRNO | errno.EPERM if request in {0x5412, 0x541C, 0x5423} else ALLOW
            assert judge(machine, "ioctl", 0, request) == expected
            assert judge(machine, "ioctl", 0, request | HIGH_BITS) == expected


class TestTables:
    def test_every_name_on_the_list_is_a_system_call(self) -> None:
        assert allowed() <= set(numbers("x86_64")) | set(numbers("aarch64"))
        assert not allowed() & CONDITIONAL

    @pytest.mark.parametrize("machine", MACHINES)
    def test_no_two_calls_share_a_number(self, machine: str) -> None:
        table = numbers(machine)
        assert len(set(table.values())) == len(table)
        assert list(table.values()) == sorted(table.values())

    def test_x86_64_is_numbered_as_in_the_kernel(self) -> None:
        header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
        agree_with(header, r"#define __NR_(\w+) (\d+)", "x86_64")

    def test_aarch64_is_numbered_as_in_the_kernel(self) -> None:
        header = Path("/usr/include/asm-generic/unistd.h")
        agree_with(header, r"#define __NR(?:3264)?_(\w+) (\d+)", "aarch64")


def agree_with(header: Path, pattern: str, machine: str) -> None:
    """What the header has is in the table, by the same name."""
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    theirs: dict[int, set[str]] = {}
    for name, number in re.findall(pattern, header.read_text()):
        # The first two are counts and limits. The kernel's name for the third is ours.
        if name not in {"syscalls", "arch_specific_syscall"}:
            theirs.setdefault(int(number), set()).add("newfstatat" if name == "fstatat" else name)
    ours = {number: name for name, number in numbers(machine).items()}
    both = ours.keys() & theirs.keys()
    assert {n: ours[n] for n in both if ours[n] not in theirs[n]} == {}
    # 32-bit machines have some to themselves; a header may know more than the table.
    only_32_bit = range(403, 424)
    missing = theirs.keys() - both - set(only_32_bit)
    assert {n for n in missing if n <= max(ours)} == set()
