"""`smokebox doctor`: checks of this machine, each with the command that fixes it.

Modules that are slow to import are imported in the checks, to keep `smokebox --help` fast.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smokebox.errors import SmokeboxError
from smokebox.foundation.endpoint import default_home
from smokebox.isolation import TIERS, TierInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Status = Literal["ok", "missing", "optional"]

_COLOURS = {"ok": "green", "missing": "red", "optional": "yellow"}
_STACK = 1 << 30
_FREE_SPACE = 1 << 30
_INSTALLERS = {
    "apt-get": "apt-get install -y",
    "dnf": "dnf install -y",
    "apk": "apk add",
    "pacman": "pacman -S --noconfirm",
    "zypper": "zypper install -y",
    "brew": "brew install",
}
# Extra, its distribution, and its purpose.
_EXTRAS = (
    ("bucket", "obstore", "object stores as filesystems"),
    ("shell", "prompt_toolkit", "history and editing in `smokebox sh`"),
    ("deepagents", "deepagents", "sandboxes for Deep Agents"),
    ("inspect", "inspect-ai", "sandboxes for Inspect"),
    ("pydantic-ai", "pydantic-ai-slim", "sandboxes for Pydantic AI"),
)
# What the image recipe:python has.
_PROGRAMS = ("python3", "pip", "node", "npm", "git", "curl", "rg", "jq", "gcc", "make")
_LIBRARIES = ("pip", "pandas", "numpy", "matplotlib", "PIL", "openpyxl", "requests", "sklearn")
_FIND_MISSING = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
# Creating a user namespace is the only reliable test: different kernels forbid it in three ways.
_UNSHARE = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x10000000) != 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check. `missing` is required and absent, `optional` only absent."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> int:
    """Check this machine, and print how to fix what is missing.

    Exits with 0 if everything that Smokebox requires is present, with 1 otherwise.
    """
    failed = False
    checks = []
    for check in check_machine():
        failed = failed or check.status == "missing"
        checks.append(asdict(check))
        if not as_json:
            typer.secho(f"{check.status:<9}", fg=_COLOURS[check.status], nl=False)
            typer.echo(f"{check.name:<17} {check.detail}")
            if check.fix:
                typer.echo(f"{'':<9}{'':<17} fix: {check.fix}")
    if as_json:
        typer.echo(json.dumps(checks, indent=2))
    return int(failed)


def check_machine() -> Iterator[Check]:
    """Run all checks, in the order in which a person should fix them."""
    yield _python()
    yield _virtual()
    yield _threads()
    yield _space()
    yield _program("bash", "bash", "the local sandbox")
    yield _program("git", "git", "git repositories")
    yield _program("node", "nodejs", "comparison in `make bench`")
    for extra, distribution, purpose in _EXTRAS:
        yield _extra(extra, distribution, purpose)
    yield _linux()
    yield _namespaces()
    yield _overlay()
    yield _host_image()
    yield _limits()
    yield _disk_limits()
    yield from _tiers()
    yield _fuse()
    yield _kvm()
    yield from check_orphans(default_home())


def _python() -> Check:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check(
        name="python",
        status="ok" if fits else "missing",
        detail=f"{sys.version.split()[0]} at {sys.executable}",
        fix="" if fits else "install Python 3.11, 3.12 or 3.13",
    )


def _virtual() -> Check:
    import asyncio
    from importlib.metadata import version

    name, fix = "virtual sandbox", "pip install --force-reinstall smokebox"
    try:
        from smokebox.sandbox.virtual import virtual

        async def run() -> str:
            sandbox = virtual()
            try:
                return (await sandbox.exec("echo $((6 * 7))", timeout=10)).stdout
            finally:
                await sandbox.aclose()

        output = asyncio.run(run())
        if output != "42\n":
            raise RuntimeError(f"6 * 7 gave {output!r}")
    except (SmokeboxError, ImportError, OSError, RuntimeError) as error:
        return Check(name=name, status="missing", detail=f"does not run: {error}", fix=fix)
    return Check(name=name, status="ok", detail=f"bashkit {version('bashkit')}")


def _threads() -> Check:
    """Check for threads with a large stack, which scripts need and a memory limit can forbid."""
    import threading

    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    except RuntimeError:
        return Check(
            name="thread stacks",
            status="missing",
            detail="cannot start a thread with a stack of 1 GiB",
            fix="ulimit -v unlimited",
        )
    finally:
        threading.stack_size(before)
    return Check(name="thread stacks", status="ok", detail="1 GiB")


def _space() -> Check:
    import tempfile

    where = tempfile.gettempdir()
    free = shutil.disk_usage(where).free
    detail = f"{free / (1 << 30):.1f} GiB free in {where}"
    if free >= _FREE_SPACE:
        return Check(name="disk space", status="ok", detail=detail)
    fix = "free at least 1 GiB there, or set TMPDIR to a directory that has it"
    return Check(name="disk space", status="optional", detail=detail, fix=fix)


def _program(name: str, package: str, purpose: str) -> Check:
    path = shutil.which(name)
    if path:
        return Check(name=name, status="ok", detail=path)
    return Check(
        name=name, status="optional", detail=f"not found; for {purpose}", fix=_install(package)
    )


def _install(package: str) -> str:
    found = (command for name, command in _INSTALLERS.items() if shutil.which(name))
    return f"{next(found, 'install')} {package}"


def _extra(extra: str, distribution: str, purpose: str) -> Check:
    from importlib.metadata import PackageNotFoundError, version

    name = f"extra {extra}"
    try:
        return Check(name=name, status="ok", detail=f"{distribution} {version(distribution)}")
    except PackageNotFoundError:
        return Check(
            name=name,
            status="optional",
            detail=f"not installed; for {purpose}",
            fix=f"pip install 'smokebox[{extra}]'",
        )


def _namespaces() -> Check:
    import subprocess

    command = [sys.executable, "-I", "-S", "-c", _UNSHARE]
    allowed = subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0
    return _kernel(
        "user namespaces",
        lambda: allowed,
        "allowed",
        "not allowed for this user",
        "sysctl -w user.max_user_namespaces=15000 kernel.apparmor_restrict_unprivileged_userns=0",
    )


def _linux() -> Check:
    """Create a sandbox and use it: the decisive check, whatever else is missing."""
    import asyncio
    import tempfile

    name = "linux sandbox"
    try:
        from smokebox.engine.host import Host

        async def run(home: str) -> str:
            async with await Host.open(home, pool=0) as host:
                sandbox = host.sandbox("doctor")
                output = (await sandbox.exec("echo $((6 * 7))", timeout=10)).stdout
                await sandbox.destroy()
                return output

        with tempfile.TemporaryDirectory(prefix="smokebox-doctor-") as home:
            output = asyncio.run(run(home))
        if output != "42\n":
            raise RuntimeError(f"6 * 7 gave {output!r}")
    except SmokeboxError as error:
        return Check(name=name, status="optional", detail=error.message, fix=error.hint)
    except (ImportError, OSError, RuntimeError) as error:
        return Check(name=name, status="optional", detail=f"does not run: {error}")
    return Check(name=name, status="ok", detail="runs, isolated by namespaces")


def _host_image() -> Check:
    """Report what agents expect of a machine, and sandboxes of the image `host` lack here."""
    import subprocess

    from smokebox.engine.images.host_image import PATH

    lacks = [name for name in _PROGRAMS if shutil.which(name, path=PATH) is None]
    if (python := shutil.which("python3", path=PATH)) is not None:
        command = [python, "-I", "-c", _FIND_MISSING, *_LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        lacks += done.stdout.split()
    if not lacks:
        return Check(name="image host", status="ok", detail="has what agents expect")
    fix = 'use image="recipe:python", which has them: `smokebox images build recipe:python`'
    detail = f"lacks {', '.join(lacks)}; for sandboxes without an image of their own"
    return Check(name="image host", status="optional", detail=detail, fix=fix)


def _limits() -> Check:
    from smokebox.engine.jail.cgroup_hierarchy import detect

    hierarchy = detect()
    return _kernel(
        "limits",
        lambda: hierarchy.enforcement != "rlimits",
        hierarchy.describe(),
        hierarchy.describe(),
        "run under `systemd-run --user --scope -p Delegate=yes`, or as root",
    )


def _disk_limits() -> Check:
    """Report how disk limits of sandboxes that are created in the state directory are enforced."""
    from smokebox.engine.quota.projects import ProjectQuotas
    from smokebox.engine.quota.storage_pool import IMAGE, kernel_lacks_quotas
    from smokebox.foundation.endpoint import default_home

    name, home = "disk limits", Path(default_home())
    existing = next(path for path in (home, *home.parents) if path.exists())
    if ProjectQuotas.detect(str(existing)) is not None:
        return Check(name=name, status="ok", detail=f"enforced by project quotas of {existing}")
    if os.access(home / IMAGE, os.F_OK):
        return Check(name=name, status="ok", detail=f"enforced in the storage pool {home / IMAGE}")
    if os.geteuid() == 0 and kernel_lacks_quotas():
        fix = "use a kernel with CONFIG_XFS_QUOTA, as those of distributions have"
    elif os.geteuid() == 0:
        fix = 'write pool = "50GiB" below [storage] in server.toml, or mount it with prjquota'
    else:
        fix = "run the server as root: only root can set project quotas"
    detail = "measured, and a sandbox above its limit is stopped"
    return Check(name=name, status="optional", detail=detail, fix=fix)


def _overlay() -> Check:
    return _kernel(
        "overlayfs",
        lambda: "\toverlay\n" in Path("/proc/filesystems").read_text(),
        "in the kernel",
        "not in the kernel",
        "modprobe overlay",
    )


def _tiers() -> Iterator[Check]:
    """Check the program of every isolation tier that needs one."""
    for tier in TIERS.values():
        if tier.program is not None:
            yield _tier(tier, tier.program)


def _tier(tier: TierInfo, program: str) -> Check:
    path = shutil.which(os.environ.get(tier.program_variable) or program)
    install = f"{_install(program)}, or see {tier.install_url}"
    if path is None:
        missing = f"{tier.summary}, is not installed"
        return _kernel(program, lambda: False, "", missing, install)
    release = _release(path)
    detail = f"{path}, release {release or 'unknown'}"
    if release is None or release >= tier.oldest:
        return Check(name=program, status="ok", detail=detail)
    return Check(
        name=program,
        status="optional",
        detail=f"{detail}, is older than {tier.oldest}: {tier.flaw}",
        fix=f"install that of Debian 13 or later, or see {tier.install_url}, and set "
        f"{tier.program_variable} to its path if it is not on the PATH",
    )


def _release(path: str) -> int | None:
    """Return the date of the release of a program, such as 20240729."""
    import subprocess

    command = [path, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    # "runsc version release-20240729.0", and in Debian "runsc version 0.0~20240729.0".
    found = re.search(r"\b20\d{6}\b", done.stdout.replace("~", " "))
    return int(found[0]) if found else None


def _fuse() -> Check:
    return _kernel(
        "/dev/fuse",
        lambda: os.access("/dev/fuse", os.R_OK | os.W_OK),
        "usable, for mounting buckets",
        "missing or not usable by this user; mounts need it",
        "modprobe fuse; in Docker add --device /dev/fuse",
    )


def _kvm() -> Check:
    return _kernel(
        "/dev/kvm",
        lambda: os.access("/dev/kvm", os.R_OK | os.W_OK),
        "usable",
        "missing or not usable by this user",
        "modprobe kvm && usermod -aG kvm $USER",
    )


def check_orphans(home: str) -> Iterator[Check]:
    """List sandboxes that still run while no server owns the state directory `home`."""
    import sqlite3

    from smokebox.cli.output import format_age, format_size, format_span
    from smokebox.engine.orphans import find_orphans

    try:
        orphans = find_orphans(home)
    except (OSError, sqlite3.Error) as error:
        detail = f"the record of {home} cannot be read: {error}"
        fix = "run this as the owner of that directory, or set SMOKEBOX_HOME to another"
        yield Check(name="orphans", status="optional", detail=detail, fix=fix)
        return
    except SmokeboxError as error:
        yield Check(name="orphans", status="optional", detail=error.message, fix=error.hint)
        return
    if not orphans:
        yield Check(name="orphans", status="ok", detail=f"no sandbox of {home} lacks a server")
    for one in orphans:
        since, memory = format_age(one.since), format_size(one.memory)
        end = (
            "stays" if one.timeout is None else f"ends {format_span(one.timeout)} after it lost it"
        )
        yield Check(
            name=f"sandbox {one.id}",
            status="optional",
            detail=f"runs without a server, {end}; started {since}, {memory} of memory",
            fix=f"`smokebox sleep {one.id}` ends it and keeps its files, `smokebox up` adopts it",
        )


def _kernel(name: str, test: Callable[[], bool], good: str, bad: str, fix: str) -> Check:
    try:
        ok = test()
    except OSError as error:
        ok, bad = False, f"cannot be checked: {error}"
    if ok:
        return Check(name=name, status="ok", detail=good)
    return Check(name=name, status="optional", detail=f"{bad}; for Linux sandboxes", fix=fix)
