"""The system-call filter of a jail, as a BPF program.

It is an allow-list that starts from Docker's default profile, for a container with no capability
beyond the default ones. System calls that are not listed fail with EPERM. Numbers missing in the
table fail with ENOSYS, so that a program falls back to an older call; so does `clone3`, since a
filter cannot see its flags, and so do the numbers of x32. It is stricter than the default:

- A call through another architecture's entry point (`int 0x80`, AArch32) kills the process. Its
  numbers mean other calls, and its kernel code is less tested.
- `socket` and `socketpair` allow AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, and fail with
  EAFNOSUPPORT for the rest. AF_VSOCK would reach the hypervisor. AF_PACKET (CVE-2017-7308,
  CVE-2020-14386), AF_ALG (CVE-2013-7421, CVE-2016-8646), AF_KEY, AF_TIPC (CVE-2021-43267,
  CVE-2022-0435), AF_CAN (CVE-2021-3609), AF_RDS (CVE-2010-3904), AF_XDP, Bluetooth and the
  old protocols had vulnerabilities, and opening one loads its module.
- Of the internet protocols, TCP, UDP, ICMP and raw ones are allowed, without SCTP, DCCP
  (CVE-2017-6074) and L2TP; of netlink, routes, socket diagnosis and device events, without
  netfilter and IPsec. The rest fails with EPROTONOSUPPORT.
- TIOCSTI and TIOCLINUX, which type into the terminal of a user of the sandbox, and TIOCSETD, which
  loads line disciplines (CVE-2017-2636), fail with EPERM.
- `modify_ldt` fails with EPERM: it serves 16 and 32-bit programs, which cannot run here.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct

from smokebox.engine.jail.linux import syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Names in the order of their numbers; a number is that of the next name.
_X86_64 = """
    read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction
    rt_sigprocmask rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield
    mremap msync mincore madvise shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm
    setitimer getpid sendfile socket connect accept sendto recvfrom sendmsg recvmsg shutdown bind
    listen getsockname getpeername socketpair setsockopt getsockopt clone fork vfork execve exit
    wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock fsync
    fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink
    symlink readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo
    times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid
    setreuid setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid
    setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend
    sigaltstack utime mknod uselib personality ustat statfs fstatfs sysfs getpriority setpriority
    sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
    modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday
    mount umount2 swapon swapoff reboot sethostname setdomainname iopl ioperm create_module
    init_module delete_module get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg
    afs_syscall tuxcall security gettid readahead setxattr lsetxattr fsetxattr getxattr lgetxattr
    fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex
    sched_setaffinity sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit
    io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old epoll_wait_old
    remap_file_pages getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
    timer_settime timer_gettime timer_getoverrun timer_delete clock_settime clock_gettime
    clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes vserver mbind
    set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
    mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init
    inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat
    newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll
    unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages utimensat
    epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4
    signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo
    perf_event_open recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at
    open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv process_vm_writev
    kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create
    kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
    pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq uretprobe
"""

_AARCH64 = """
    io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr
    lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd
    lookup_dcookie eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1
    inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat
    symlinkat linkat renameat umount2 mount pivot_root nfsservctl statfs fstatfs truncate ftruncate
    fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat fchown openat close vhangup
    pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv pwritev sendfile
    pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync
    sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset
    personality exit exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list
    nanosleep getitimer setitimer kexec_load init_module delete_module timer_create timer_gettime
    timer_getoverrun timer_settime timer_delete clock_settime clock_gettime clock_getres
    clock_nanosleep syslog ptrace sched_setparam sched_setscheduler sched_getscheduler
    sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack
    rt_sigsuspend rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo
    rt_sigreturn setpriority getpriority reboot setregid setgid setreuid setuid setresuid getresuid
    setresgid getresgid setfsuid setfsgid times setpgid getpgid getsid setsid getgroups setgroups
    uname sethostname setdomainname getrlimit setrlimit getrusage umask prctl getcpu gettimeofday
    settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo mq_open
    mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd
    semget semctl semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept
    connect getsockname getpeername sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg
    readahead brk munmap mremap add_key request_key keyctl clone execve mmap fadvise64 swapon
    swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise remap_file_pages mbind
    get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo perf_event_open accept4
    recvmmsg 260 wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at
    clock_adjtime syncfs setns sendmmsg process_vm_readv process_vm_writev kcmp finit_module
    sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd
    membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx
    io_pgetevents rseq kexec_file_load
"""

# Numbers are the same on every architecture from 424 on, here up to Linux 6.10.
_COMMON = """
    424
    pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen
    fsconfig fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2
    process_madvise epoll_pwait2 mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule
    landlock_restrict_self memfd_secret process_mrelease futex_waitv set_mempolicy_home_node
    cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount
    lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal
"""

_TABLES = {"x86_64": _X86_64, "aarch64": _AARCH64}
# Names that an architecture lacks are ignored there.
_ALLOWED = """
    accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod
    chown chroot clock_adjtime clock_getres clock_gettime clock_nanosleep close close_range connect
    copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old
    epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit
    exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod fchmodat
    fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr
    fstat fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv futex_wake futimesat
    get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid
    getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid
    getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr
    inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents
    io_pgetevents io_setup io_submit ioprio_get ioprio_set kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listmount
    listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier
    memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap
    mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap mseal
    msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep
    newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc
    pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64 process_mrelease
    process_vm_readv process_vm_writev pselect6 ptrace pwrite64 pwritev pwritev2 read readahead
    readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr rename renameat
    renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
    rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
    sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler
    sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto
    set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer
    setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid
    setxattr shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat statfs
    statmount statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time
    timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
    timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat uretprobe utime
    utimensat utimes vfork vmsplice wait4 waitid write writev
"""

_MACHINE = os.uname().machine
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1

# Instructions of classic BPF, and offsets in struct seccomp_data, both little-endian.
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_INSTRUCTION = struct.Struct("=HBBI")

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET. `clone` reads CLONE_NEWTIME
# as a bit of the exit signal.
_CLONE_NEW = 0x7E020000
# PER_LINUX and PER_LINUX32, each with UNAME26 or without, and the query of the current one.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
# SOCK_STREAM, DGRAM and RAW. AF_INET with SOCK_PACKET, a fourth, is an AF_PACKET socket.
_INET_TYPES = (1, 2, 3)
_SOCK_TYPE_MASK = 0xF
# IP (the default of the type), ICMP, TCP, UDP, ICMPv6 and RAW.
_INET_PROTOCOLS = (0, 1, 6, 17, 58, 255)
# ROUTE, SOCK_DIAG and KOBJECT_UEVENT.
_NETLINK_PROTOCOLS = (0, 4, 15)


def numbers(machine: str) -> dict[str, int]:
    """Return the system calls of `machine`, as `os.uname` names it, in order of their numbers."""
    if machine not in _TABLES:
        # Imported here, as a jail does not need it.
        from smokebox.errors import IsolationUnavailable

        raise IsolationUnavailable(
            f"no table of system calls for {machine!r}",
            hint=f"Run on one of {', '.join(sorted(_TABLES))}.",
            tier="namespaces",
        )
    found: dict[str, int] = {}
    number = 0
    for word in (_TABLES[machine] + _COMMON).split():
        if word.isdigit():
            number = int(word)
        else:
            found[word] = number
            number += 1
    return found


def allowed() -> frozenset[str]:
    """Return the system calls that are allowed with any arguments."""
    return frozenset(_ALLOWED.split())


@functools.cache
def profile(machine: str = _MACHINE) -> bytes:
    """Return the filter as a BPF program, for `machine` as `os.uname` names it."""
    rules = _search(_ranges(numbers(machine)))
    return (
        _op(_LOAD, _ARCHITECTURE)
        + _op(_IF_EQUAL, _ARCHITECTURES[machine], then=1)
        + _KILL
        + _op(_LOAD, _NUMBER)
        + rules
    )


def install(program: bytes) -> None:
    """Filter this thread and its future children by `program`. It cannot be undone.

    Needs no_new_privs. Mitigations of speculation stay as strict as the kernel has them for
    filtered processes.
    """
    address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
    # struct sock_fprog: the number of instructions and their address.
    sock_fprog = struct.pack("@HP", len(program) // _INSTRUCTION.size, address)
    number = _SYS_SECCOMP.get(_MACHINE, -1)
    syscall("the system-call filter was refused", number, _SET_MODE_FILTER, 0, sock_fprog)


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode an instruction; `then` and `otherwise` are instructions to skip, at most 255."""
    return _INSTRUCTION.pack(code, then, otherwise, value)


def _size(block: bytes) -> int:
    return len(block) // _INSTRUCTION.size


def _refuse(number: int) -> bytes:
    return _op(_RETURN, 0x00050000 | number)


_ALLOW = _op(_RETURN, 0x7FFF0000)
_KILL = _op(_RETURN, 0x80000000)


def _argument(index: int) -> bytes:
    """Load the low half of an argument.

    The kernel uses only that half of the arguments checked here. A rule for the whole value would
    pass one with any bit of the high half set.
    """
    return _op(_LOAD, _ARGUMENTS + 8 * index)


def _one_of(values: Sequence[int], then: bytes, otherwise: bytes) -> bytes:
    """Continue with `then` if the loaded value is one of `values`. Both end in a verdict."""
    farthest = _size(otherwise) + len(values) - 1
    tests = (_op(_IF_EQUAL, value, then=farthest - at) for at, value in enumerate(values))
    return b"".join(tests) + otherwise + then


def _conditional() -> dict[str, bytes]:
    """Return the rules of system calls that depend on arguments."""
    perm = _refuse(errno.EPERM)
    return {
        "clone": _argument(0) + _op(_IF_ANY_BIT, _CLONE_NEW, otherwise=1) + perm + _ALLOW,
        "clone3": _refuse(errno.ENOSYS),
        "ioctl": _argument(1) + _one_of((_TIOCSTI, _TIOCLINUX, _TIOCSETD), perm, _ALLOW),
        "personality": _argument(0) + _one_of(_PERSONALITIES, _ALLOW, perm),
        "socket": _socket(),
        "socketpair": _socket(),
    }


def _socket() -> bytes:
    no_protocol = _refuse(errno.EPROTONOSUPPORT)
    netlink = _argument(2) + _one_of(_NETLINK_PROTOCOLS, _ALLOW, no_protocol)
    inet = (
        _argument(1)
        + _op(_AND, _SOCK_TYPE_MASK)
        + _one_of(
            _INET_TYPES,
            _argument(2) + _one_of(_INET_PROTOCOLS, _ALLOW, no_protocol),
            _refuse(errno.ESOCKTNOSUPPORT),
        )
    )
    other = _one_of((_AF_NETLINK,), netlink, _refuse(errno.EAFNOSUPPORT))
    return _argument(0) + _one_of((_AF_UNIX,), _ALLOW, _one_of((_AF_INET, _AF_INET6), inet, other))


def _ranges(table: dict[str, int]) -> list[tuple[int, bytes]]:
    """Return rules by number, each with the first number it applies to."""
    rules = dict.fromkeys(table, _refuse(errno.EPERM))
    rules |= dict.fromkeys(allowed() & table.keys(), _ALLOW)
    rules |= _conditional()
    by_number = {number: rules[name] for name, number in table.items()}
    unknown = _refuse(errno.ENOSYS)
    ranges: list[tuple[int, bytes]] = []
    for number in range(max(by_number) + 2):
        rule = by_number.get(number, unknown)
        if not ranges or ranges[-1][1] != rule:
            ranges.append((number, rule))
    return ranges


def _search(ranges: Sequence[tuple[int, bytes]]) -> bytes:
    """Find the rule of the loaded number by binary search."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    lower, upper = _search(ranges[:middle]), _search(ranges[middle:])
    return _op(_IF_AT_LEAST, ranges[middle][0], then=_size(lower)) + lower + upper
