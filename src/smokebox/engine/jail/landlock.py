"""Landlock rules that confine a jail to its own files.

Mounts and namespaces decide which paths exist. What leads past them is a descriptor, or a magic
link such as /proc/self/exe: the first process of a jail is an interpreter of the host, and a file
that starts with `#!/proc/self/exe` would run it inside, able to change it if root inside owns it
(CVE-2019-5736).
"""

from __future__ import annotations

import ctypes
import os
import struct

from smokebox.engine.jail.linux import syscall

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
# EXECUTE, WRITE_FILE, READ_FILE, READ_DIR and REFER. REFER, renames and links between
# directories, is refused wherever no rule allows it.
_READ_AND_WRITE = 0b0110
_ACCESS = 0b1111 | 1 << 13
# The first version with REFER: without it, no file could move to another directory.
_LEAST = 2


def version() -> int:
    """Return the Landlock version of the kernel; 0 for none."""
    try:
        return syscall("landlock", _SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    except OSError:
        return 0


def confine(root: str, *files: str) -> bool:
    """Restrict this process and its future children to files below `root`.

    They may also read and write `files` and below. It cannot be undone, and needs no_new_privs.
    Pipes, sockets and unnamed files are not affected. Returns False if the kernel lacks it.
    """
    if version() < _LEAST:
        return False
    handled = struct.pack("=Q", _ACCESS)
    ruleset = syscall("landlock", _SYS_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    try:
        _allow(ruleset, root, _ACCESS)
        for path in files:
            _allow(ruleset, path, _READ_AND_WRITE)
        syscall("landlock", _SYS_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, fd)
        syscall("landlock", _SYS_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)
