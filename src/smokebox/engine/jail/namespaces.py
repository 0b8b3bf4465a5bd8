"""The default tier: jails made of the kernel's namespaces, by ourselves, without any helper."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from smokebox.engine.jail.zygote_jail import ZygoteJailer
from smokebox.errors import IsolationUnavailable, SandboxGone, ServiceUnavailable

if TYPE_CHECKING:
    from smokebox.errors import SmokeboxError
    from smokebox.isolation import Tier


class NamespaceJailer(ZygoteJailer):
    """Makes and finds jails of namespaces on this host."""

    @property
    def tier(self) -> Tier:
        """`namespaces`."""
        return "namespaces"

    def explain(self, error: OSError) -> SmokeboxError:
        """What the kernel's refusal to make a jail means, and what mends it."""
        return explain(error, self.tier)


def explain(error: OSError, tier: Tier) -> SmokeboxError:
    """What the kernel's refusal to make a jail means, and what mends it."""
    number, text = error.errno, error.strerror or str(error)
    if number in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        return ServiceUnavailable(
            f"this host has no room for another sandbox: {text}.",
            hint="Destroy sandboxes that are not needed, or raise `ulimit -n` and `ulimit -u`.",
            service="kernel",
        )
    if number == errno.ESRCH:
        return SandboxGone(
            f"{text}: something killed it.",
            hint="Run the command again; if it stays so, give the sandbox more memory.",
            reason="killed while it was built",
        )
    if number == errno.ENOSPC and "clone3" in text:
        hint = "Run: sysctl -w user.max_user_namespaces=15000"
    elif number == errno.ENOSPC and "unshare" in text:
        hint = "Run: sysctl -w user.max_net_namespaces=15000"
    elif number in (errno.EPERM, errno.EACCES) and ("clone3" in text or "uid_map" in text):
        hint = (
            "Allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), or "
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in Docker add "
            "--security-opt seccomp=unconfined --security-opt systempaths=unconfined."
        )
    elif "proc on" in text:
        hint = "In Docker add --security-opt systempaths=unconfined: /proc is masked here."
    elif "overlay" in text or "mount_setattr" in text:
        hint = (
            "Put SMOKEBOX_HOME on ext4, xfs, btrfs or tmpfs (in a container: on a volume), "
            "on Linux 5.19 or later."
        )
    else:
        hint = "Run `smokebox doctor`."
    return IsolationUnavailable(
        f"this host refuses to isolate a sandbox: {text}.", hint=hint, tier=tier
    )
