"""The jail's own files, and no others: a rule of the kernel that a leaked path runs into.

Mounts and namespaces decide which paths lead anywhere. What leads past them is a descriptor,
or a magic link such as /proc/self/exe: the first process of a jail is an interpreter of the
host's, and a file with `#!/proc/self/exe` at its top would start that inside, to change it
if its owner is who root inside is (CVE-2019-5736).
"""

from __future__ import annotations

import ctypes
import os
import struct

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
# EXECUTE, WRITE_FILE, READ_FILE, READ_DIR and REFER: to rename and to link between
# directories, which is refused to all that the rules do not allow it.
_READ_AND_WRITE = 0b0110
_ACCESS = 0b1111 | 1 << 13
# The first version that knows REFER, without which no file could change its directory.
_LEAST = 2

_syscall = ctypes.CDLL(None, use_errno=True).syscall


def version() -> int:
    """Which version of these rules the kernel has; 0 for none."""
    answer: int = _syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    return max(0, answer)


def confine(root: str, *files: str) -> bool:
    """Let this process and all that it will start open what is below `root`.

    And, to read and to write, `files` and what is below them. For good, after no_new_privs
    was set. Pipes, sockets and files without a name stay as they are. False where the
    kernel cannot.
    """
    if version() < _LEAST:
        return False
    handled = struct.pack("=Q", _ACCESS)
    ruleset = _checked(_syscall(_SYS_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    try:
        _allow(ruleset, root, _ACCESS)
        for path in files:
            _allow(ruleset, path, _READ_AND_WRITE)
        _checked(_syscall(_SYS_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, fd)
        _checked(_syscall(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return result
