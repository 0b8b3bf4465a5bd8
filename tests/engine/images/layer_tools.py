"""Layers made in code, and what a tree of files looks like."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

    from smokebox.engine.images.layer_store import LayerStore, StoredLayer

TAR = "application/vnd.oci.image.layer.v1.tar"


@dataclass
class Member:
    """A member of an archive."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: float = 1_600_000_000
    link: str = ""
    device: tuple[int, int] = (0, 0)
    xattrs: dict[str, str] = field(default_factory=dict)


def file(name: str, data: bytes = b"", **options: Any) -> Member:
    return Member(name, data, **options)


def folder(name: str, mode: int = 0o755, **options: Any) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=mode, **options)


def symlink(name: str, link: str, **options: Any) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, link=link, mode=0o777, **options)


def hard_link(name: str, link: str) -> Member:
    return Member(name, kind=tarfile.LNKTYPE, link=link)


def archive(members: Iterable[Member]) -> bytes:
    """Return a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.mode, info.linkname = member.kind, member.mode, member.link
            info.uid, info.gid, info.mtime = member.uid, member.gid, member.mtime
            info.devmajor, info.devminor = member.device
            info.size = len(member.data)
            info.pax_headers = {f"SCHILY.xattr.{k}": v for k, v in member.xattrs.items()}
            tar.addfile(info, io.BytesIO(member.data))
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def chunks_of(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def unpack(
    store: LayerStore,
    layer: bytes | Iterable[Member],
    *,
    below: Iterable[bytes] = (),
    blob: bytes | None = None,
    **options: Any,
) -> StoredLayer:
    """Unpack an archive, compressed by gzip unless a blob of it is passed."""
    plain = layer if isinstance(layer, bytes) else archive(layer)
    data = gzip.compress(plain, 1) if blob is None else blob
    options.setdefault("digest", sha256(data))
    options.setdefault("diff_id", sha256(plain))
    return await store.unpack(
        chunks_of(data),
        media_type=f"{TAR}+gzip",
        below=[sha256(one) for one in below],
        **options,
    )


def tree(
    root: str | Path, *, times: bool = True, skip: Collection[str] = ()
) -> dict[str, tuple[object, ...]]:
    """Return type, mode, owner, content and time of everything below a directory."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        if folder == str(root):
            folders[:] = [name for name in folders if name not in skip]
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            at = os.lstat(path)
            content: object = at.st_rdev
            if stat.S_ISREG(at.st_mode):
                content = Path(path).read_bytes()
            elif stat.S_ISLNK(at.st_mode):
                content = os.readlink(path)
            mode = 0 if stat.S_ISLNK(at.st_mode) else stat.S_IMODE(at.st_mode)
            found[os.path.relpath(path, root)] = (
                stat.S_IFMT(at.st_mode),
                oct(mode),
                at.st_uid,
                at.st_gid,
                content,
                int(at.st_mtime) if times else 0,
            )
    return found
