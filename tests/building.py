"""Builds in tests: contexts made of dicts, a small base image, and trees of images."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import tarfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.engine.files.trees import walk
from smokebox.engine.images.build.builds import BuildRequest
from smokebox.engine.images.build.step_sandbox import StepSandbox, StepSettings
from smokebox.wire.builds import BuildEvent, ContextEntry

if TYPE_CHECKING:
    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.host import Host

BASE = "base:1"
# Files that Smokebox generates, and places that a sandbox mounts on.
OURS = {"etc/hosts", "etc/hostname", "etc/resolv.conf"}
MOUNTS = ("dev", "proc", "sys", "run", "workspace", "tmp")
APPLETS = tuple(
    "sh cat cp chmod chown echo env false find grep head id ln ls mkdir mv pwd rm rmdir sed seq "  # noqa: SIM905
    "sleep stat tail tar test touch true wc whoami".split()
)

Tree = dict[str, tuple[Any, ...]]


def base_tar() -> bytes:
    """Return a root file system with busybox, and the user app."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:

        def add(name: str, data: bytes = b"", **fields: Any) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o644, 1_700_000_000
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))

        for name, mode in {
            "bin": 0o755, "etc": 0o755, "home": 0o755, "home/app": 0o750, "root": 0o700,
            "srv": 0o755, "tmp": 0o1777, "usr": 0o755, "usr/lib": 0o755, "var": 0o755,
        }.items():  # fmt: skip
            owner = 1000 if name == "home/app" else 0
            add(name, type=tarfile.DIRTYPE, mode=mode, uid=owner, gid=owner)
        busybox = shutil.which("busybox")
        assert busybox is not None, "busybox is missing: apt-get install busybox-static"
        with open(busybox, "rb") as file:
            add("bin/busybox", file.read(), mode=0o755)
        for applet in APPLETS:
            add(f"bin/{applet}", type=tarfile.SYMTYPE, linkname="busybox", mode=0o777)
        add("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n")
        add("etc/group", b"root:x:0:\napp:x:1001:\nteam:x:2000:app\n")
        add("var/link", type=tarfile.SYMTYPE, linkname="/srv", mode=0o777)
    return buffer.getvalue()


@dataclass
class Entry:
    """A file of a context with its mode and time; a directory without data, or a symlink."""

    data: bytes = b""
    mode: int = 0o644
    mtime: int = 1_600_000_000
    target: str = ""
    directory: bool = False


Files = Mapping[str, "str | bytes | Entry"]


@dataclass
class Built:
    """A finished build."""

    digest: str
    events: list[BuildEvent] = field(default_factory=list)

    @property
    def output(self) -> str:
        """The output of all steps."""
        return "".join(event.data for event in self.events if event.kind == "output")

    @property
    def warnings(self) -> list[str]:
        """The warnings."""
        return [event.data for event in self.events if event.kind == "warning"]

    @property
    def ran(self) -> list[str]:
        """The instructions that were not cached."""
        return [
            event.instruction for event in self.events if event.kind == "done" and not event.cached
        ]


async def context(host: Host, files: Files, scope: str = "") -> list[ContextEntry]:
    """Upload files, and return their entries."""
    entries = []
    for path, value in files.items():
        entry = value if isinstance(value, Entry) else Entry(_bytes(value))
        if entry.directory or entry.target:
            kind: Any = "directory" if entry.directory else "symlink"
            entries.append(ContextEntry(path=path, type=kind, mode=entry.mode, target=entry.target))
            continue
        digest = hashlib.sha256(entry.data).hexdigest()

        async def chunks(data: bytes = entry.data) -> AsyncIterator[bytes]:
            yield data

        await host.builds.content.put(digest, chunks(), scope=scope)
        entries.append(
            ContextEntry(
                path=path,
                type="file",
                mode=entry.mode,
                size=len(entry.data),
                mtime_ns=entry.mtime * 10**9,
                digest=digest,
            )
        )
    return entries


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


async def build(host: Host, text: str, files: Files | None = None, **options: Any) -> Built:
    """Build a Dockerfile."""
    entries = await context(host, files or {}, options.get("scope", ""))
    request = BuildRequest(dockerfile=text, entries=entries, **options)
    events = [event async for event in host.builds.run(request)]
    return Built(events[-1].digest, events)


async def build_base(host: Host) -> None:
    """Build the small base image."""
    await build(host, "FROM scratch\nADD base.tar /", {"base.tar": base_tar()}, names=(BASE,))


async def tree(host: Host, digest: str) -> Tree:
    """Return the files of an image by path: type, mode, owner, and content or target."""
    catalog = host.builds.catalog
    found = await catalog.get(digest)
    assert found is not None
    image = await catalog.load(found, digest)
    async with StepSandbox(host._context, image, StepSettings()) as sandbox:
        return await sandbox.files(_tree_of)


def _tree_of(files: RootedFiles) -> Tree:
    top = os.open(f"/proc/self/fd/{files.root}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return read_tree(top, files.owner.uid, skip=True)
    finally:
        os.close(top)


def read_tree(top: int, first_id: int, *, skip: bool) -> Tree:
    """Return the files below an open directory."""
    found: Tree = {}
    for entry in walk(top, skip=_is_ours if skip else None):
        status = entry.stat
        kind, detail = stat.S_IFMT(status.st_mode), b""
        if stat.S_ISREG(status.st_mode):
            fd = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=entry.folder)
            with os.fdopen(fd, "rb") as file:
                detail = hashlib.sha256(file.read()).digest()
        elif stat.S_ISLNK(status.st_mode):
            detail = os.fsencode(os.readlink(entry.name, dir_fd=entry.folder))
        mode = stat.S_IMODE(status.st_mode)
        found[entry.path] = (
            kind, oct(mode), status.st_uid - first_id, status.st_gid - first_id, detail
        )  # fmt: skip
    return found


def _is_ours(path: str) -> bool:
    return path in OURS or path.split("/")[0] in MOUNTS


def status_of(found: Tree, path: str) -> tuple[str, int, int]:
    """Return the mode and the owner of a path."""
    return found[path][1:4]


def sha(text: str) -> bytes:
    """Return the content of a tree's file for a text."""
    return hashlib.sha256(text.encode()).digest()
