"""What a jail gets and gives up when it is entered, in every tier. Used inside of it."""

from __future__ import annotations

import contextlib
import os
import resource

from smokebox.engine.jail import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Any address that is not of the loopback would do: all that is asked by DNS comes to the engine.
RESOLVER = "10.11.0.1"
_RESOLV_CONF = "/etc/resolv.conf"

# What root inside may do, to files, processes and ports of the sandbox alone.
CAPABILITIES = (
    linux.CAP_CHOWN,
    linux.CAP_DAC_OVERRIDE,
    linux.CAP_FOWNER,
    linux.CAP_FSETID,
    linux.CAP_KILL,
    linux.CAP_SETGID,
    linux.CAP_SETUID,
    linux.CAP_NET_BIND_SERVICE,
    linux.CAP_SYS_CHROOT,
)


def take_name(name: str) -> None:
    """Have a name, that programs inside can look up too, and somebody to ask for others."""
    linux.sethostname(name)
    with contextlib.suppress(OSError):
        _write("/etc/hostname", f"{name}\n")
        _write("/etc/hosts", f"127.0.0.1 localhost {name}\n::1 localhost ip6-localhost\n")
    with contextlib.suppress(OSError):
        # Often a link to where systemd has its own.
        if os.path.islink(_RESOLV_CONF):
            os.unlink(_RESOLV_CONF)
        _write(_RESOLV_CONF, f"nameserver {RESOLVER}\n")


def hold_to(rlimits: Mapping[int, int]) -> None:
    """Set limits for this process and what it starts, none above those that it has."""
    for kind, value in rlimits.items():
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def lock_up() -> None:
    """Give up what only building needed; nothing that is started gets it back."""
    os.umask(0o022)
    linux.set_dumpable(False)
    linux.limit_capabilities(CAPABILITIES)
    linux.set_capabilities(CAPABILITIES)


def _write(path: str, text: str) -> None:
    # The sandbox may have left a pipe there, which would hold us for ever.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
