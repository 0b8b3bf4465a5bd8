"""The default tier: jails made of the kernel's namespaces, without helper programs."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from smokebox.engine.jail.jail import Jailer
from smokebox.errors import IsolationUnavailable, SandboxGone, ServiceUnavailable

if TYPE_CHECKING:
    from smokebox.errors import SmokeboxError
    from smokebox.isolation import Tier


class NamespaceJailer(Jailer):
    """Creates and adopts jails made of namespaces."""

    @property
    def tier(self) -> Tier:
        return "namespaces"

    def explain(self, error: OSError) -> SmokeboxError:
        return explain(error, self.tier)


def explain(error: OSError, tier: Tier) -> SmokeboxError:
    """Return the error, with a hint, for a jail that the kernel did not let us create."""
    number, text = error.errno, error.strerror or str(error)
    if number in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        return ServiceUnavailable(
            f"this host has no room for another sandbox: {text}.",
            hint="Destroy sandboxes that are not needed, or raise `ulimit -n` and `ulimit -u`.",
            service="kernel",
        )
    if number == errno.ESRCH:
        return SandboxGone(
            f"{text}: it was killed.",
            hint="Run the command again; if it fails again, give the sandbox more memory.",
            reason="killed during its set-up",
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
