"""What `smokebox doctor` looks at: one function for each thing a machine may have."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Status = Literal["ok", "missing", "optional"]

_STACK = 1 << 30
_ROOM = 1 << 30
_INSTALLERS = {
    "apt-get": "apt-get install -y",
    "dnf": "dnf install -y",
    "apk": "apk add",
    "pacman": "pacman -S --noconfirm",
    "zypper": "zypper install -y",
    "brew": "brew install",
}
# Extra, the distribution in it, and what it is for.
_EXTRAS = (
    ("bucket", "obstore", "object stores as filesystems"),
    ("shell", "prompt_toolkit", "history and editing in `smokebox sh`"),
    ("deepagents", "deepagents", "sandboxes for Deep Agents"),
    ("inspect", "inspect-ai", "sandboxes for Inspect"),
    ("pydantic-ai", "pydantic-ai-slim", "sandboxes for Pydantic AI"),
)
# Making a user namespace is the only true test: three settings of three kernels can forbid it.
_UNSHARE = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x10000000) != 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at. `missing` is required and not there, `optional` only not there."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def check_machine() -> Iterator[Check]:
    """Look at everything, in the order in which a person should mend it."""
    yield _python()
    yield _virtual()
    yield _threads()
    yield _space()
    yield _program("bash", "bash", "the local sandbox")
    yield _program("git", "git", "working with repositories")
    yield _program("node", "nodejs", "the yardstick of `make bench`")
    for extra, distribution, purpose in _EXTRAS:
        yield _extra(extra, distribution, purpose)
    yield _linux()
    yield _namespaces()
    yield _overlay()
    yield _limits()
    yield _runsc()
    yield _fuse()
    yield _kvm()


def _python() -> Check:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check(
        name="python",
        status="ok" if fits else "missing",
        detail=f"{sys.version.split()[0]} at {sys.executable}",
        mend="" if fits else "install Python 3.11, 3.12 or 3.13",
    )


def _virtual() -> Check:
    name, mend = "virtual sandbox", "pip install --force-reinstall smokebox"
    try:
        from smokebox.sandbox.virtual import virtual

        async def answer() -> str:
            sandbox = virtual()
            try:
                return (await sandbox.exec("echo $((6 * 7))", timeout=10)).stdout
            finally:
                await sandbox.aclose()

        said = asyncio.run(answer())
        if said != "42\n":
            raise RuntimeError(f"6 * 7 gave {said!r}")
    except (SmokeboxError, ImportError, OSError, RuntimeError) as error:
        return Check(name=name, status="missing", detail=f"does not run: {error}", mend=mend)
    return Check(name=name, status="ok", detail=f"bashkit {version('bashkit')}")


def _threads() -> Check:
    """Scripts run on threads with a big stack, which a limit on memory can forbid."""
    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    except RuntimeError:
        return Check(
            name="thread stacks",
            status="missing",
            detail="no thread with a stack of 1 GiB can be made",
            mend="ulimit -v unlimited",
        )
    finally:
        threading.stack_size(before)
    return Check(name="thread stacks", status="ok", detail="1 GiB")


def _space() -> Check:
    where = tempfile.gettempdir()
    free = shutil.disk_usage(where).free
    detail = f"{free / (1 << 30):.1f} GiB free in {where}"
    if free >= _ROOM:
        return Check(name="disk space", status="ok", detail=detail)
    mend = "free at least 1 GiB there, or set TMPDIR to a directory that has it"
    return Check(name="disk space", status="optional", detail=detail, mend=mend)


def _program(name: str, package: str, purpose: str) -> Check:
    path = shutil.which(name)
    if path:
        return Check(name=name, status="ok", detail=path)
    return Check(
        name=name, status="optional", detail=f"not found; for {purpose}", mend=_install(package)
    )


def _install(package: str) -> str:
    found = (command for name, command in _INSTALLERS.items() if shutil.which(name))
    return f"{next(found, 'install')} {package}"


def _extra(extra: str, distribution: str, purpose: str) -> Check:
    name = f"extra {extra}"
    try:
        return Check(name=name, status="ok", detail=f"{distribution} {version(distribution)}")
    except PackageNotFoundError:
        return Check(
            name=name,
            status="optional",
            detail=f"not installed; for {purpose}",
            mend=f"pip install 'smokebox[{extra}]'",
        )


def _namespaces() -> Check:
    command = [sys.executable, "-I", "-S", "-c", _UNSHARE]
    made = subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0
    return _kernel(
        "user namespaces",
        lambda: made,
        "can be made",
        "cannot be made by this user",
        "sysctl -w user.max_user_namespaces=15000 kernel.apparmor_restrict_unprivileged_userns=0",
    )


def _linux() -> Check:
    """Make a sandbox and use it: whatever else is missing, this is the answer."""
    name = "linux sandbox"
    try:
        from smokebox.engine.host import Host

        async def answer(home: str) -> str:
            async with await Host.open(home, pool=0) as host:
                sandbox = host.sandbox("doctor")
                said = (await sandbox.exec("echo $((6 * 7))", timeout=10)).stdout
                await sandbox.destroy()
                return said

        with tempfile.TemporaryDirectory(prefix="smokebox-doctor-") as home:
            said = asyncio.run(answer(home))
        if said != "42\n":
            raise RuntimeError(f"6 * 7 gave {said!r}")
    except SmokeboxError as error:
        return Check(name=name, status="optional", detail=error.message, mend=error.hint)
    except (ImportError, OSError, RuntimeError) as error:
        return Check(name=name, status="optional", detail=f"does not run: {error}")
    return Check(name=name, status="ok", detail="runs, isolated by namespaces")


def _limits() -> Check:
    from smokebox.engine.jail.cgroups import detect

    hierarchy = detect()
    return _kernel(
        "limits",
        lambda: hierarchy.enforcement != "rlimits",
        hierarchy.describe(),
        hierarchy.describe(),
        "run under `systemd-run --user --scope -p Delegate=yes`, or as root",
    )


def _overlay() -> Check:
    return _kernel(
        "overlayfs",
        lambda: "\toverlay\n" in Path("/proc/filesystems").read_text(),
        "in the kernel",
        "not in the kernel",
        "modprobe overlay",
    )


def _runsc() -> Check:
    found = shutil.which("runsc")
    return _kernel(
        "runsc",
        lambda: found is not None,
        found or "",
        "gVisor, the stronger tier, is not installed",
        f"{_install('runsc')}, or see https://gvisor.dev/docs/user_guide/install/",
    )


def _fuse() -> Check:
    return _kernel(
        "/dev/fuse",
        lambda: os.access("/dev/fuse", os.R_OK | os.W_OK),
        "usable, for buckets as directories of Linux sandboxes",
        "not there, or not usable by this user: no bucket can be mounted in a Linux sandbox",
        "modprobe fuse; in Docker add --device /dev/fuse",
    )


def _kvm() -> Check:
    return _kernel(
        "/dev/kvm",
        lambda: os.access("/dev/kvm", os.R_OK | os.W_OK),
        "usable",
        "not there, or not usable by this user",
        "modprobe kvm && usermod -aG kvm $USER",
    )


def _kernel(name: str, test: Callable[[], bool], good: str, bad: str, mend: str) -> Check:
    try:
        there = test()
    except OSError as error:
        there, bad = False, f"cannot be looked at: {error}"
    if there:
        return Check(name=name, status="ok", detail=good)
    return Check(name=name, status="optional", detail=f"{bad}; for Linux sandboxes", mend=mend)
