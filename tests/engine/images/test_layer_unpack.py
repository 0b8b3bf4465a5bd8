"""Unpacking and packing of layers: what is kept, hidden, taken from below, and refused."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import random
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from engine.images.layer_tools import (
    Member,
    archive,
    chunks_of,
    file,
    folder,
    hard_link,
    sha256,
    symlink,
    tree,
    unpack,
)
from smokebox.engine.images.overlay import is_opaque, is_whiteout
from smokebox.errors import ImageError, LimitReached
from smokebox.foundation import compression
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smokebox.engine.images.layer_store import LayerStore, StoredLayer

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users")

EVERYTHING = [
    folder("./", 0o755),
    folder("home/", 0o750, uid=1000, gid=100),
    file("home/secret", b"x" * 5000, mode=0o600, uid=1000, gid=100, mtime=1_600_000_000.25),
    file("home/su", b"#!/bin/sh\n", mode=0o4755),
    file("closed", b"1", mode=0),
    folder("locked", 0o000, uid=7),
    file("locked/in", b"2", uid=7),
    folder("tmp", 0o1777, mtime=1_500_000_000),
    file("tmp/" + "long" * 60, b"long"),
    file("a/" * 20 + "deep", b"deep"),
    symlink("link", "/absolute/target", uid=12, gid=13),
    hard_link("same", "home/secret"),
    Member("pipe", kind=tarfile.FIFOTYPE, mode=0o620, uid=3),
    file("zeros", bytes(3 << 20)),
    file("attributes", b"", xattrs={"user.note": "text"}),
    file("\udcff\udcfe", b"not UTF-8"),
    file("empty"),
]


async def pack(layer_store: LayerStore, layer: StoredLayer) -> bytes:
    return b"".join([chunk async for chunk in layer_store.pack(layer)])


def listed(data: bytes) -> dict[str, tuple[object, ...]]:
    """Return the members of an archive."""
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        found: dict[str, tuple[object, ...]] = {}
        for one in tar:
            content = tar.extractfile(one) if one.isreg() else None
            found[one.name] = (
                one.type,
                0o777 if one.issym() else one.mode,
                one.uid,
                one.gid,
                one.linkname,
                float(one.mtime),
                content.read() if content is not None else None,
                {k: v for k, v in one.pax_headers.items() if k.startswith("SCHILY")},
            )
        return found


async def test_packed_layer_is_what_was_unpacked(layer_store: LayerStore) -> None:
    first = archive(EVERYTHING)
    layer = await unpack(layer_store, first)
    packed = await pack(layer_store, layer)
    members, original = listed(packed), listed(first)
    for parent in (m for m in members if m.startswith("a/") or m == "a"):
        if parent not in original:
            assert members[parent][:4] == (tarfile.DIRTYPE, 0o755, 0, 0)
            original[parent] = members[parent]
    # Of several names, another one may be first.
    links = {"same", "home/secret"}
    assert {n: v for n, v in members.items() if n not in links} == {
        n.rstrip("/"): v for n, v in original.items() if n not in links
    }
    assert {members[name][0] for name in links} == {tarfile.REGTYPE, tarfile.LNKTYPE}
    again = await unpack(layer_store, packed)
    assert await pack(layer_store, again) == packed
    assert tree(again.path) == tree(layer.path)


@as_root
async def test_files_have_the_owners_modes_and_times_of_the_archive(
    layer_store: LayerStore,
) -> None:
    layer = await unpack(layer_store, EVERYTHING)
    at = Path(layer.path)
    for name, owner, mode in (
        ("home", (1000, 100), 0o750),
        ("home/secret", (1000, 100), 0o600),
        ("home/su", (0, 0), 0o4755),
        ("locked", (7, 0), 0),
        ("link", (12, 13), 0o777),
        ("pipe", (3, 0), 0o620),
    ):
        found = os.lstat(at / name)
        assert ((found.st_uid, found.st_gid), stat.S_IMODE(found.st_mode)) == (owner, mode), name
    assert os.stat(at / "home/secret").st_mtime_ns == 1_600_000_000_250_000_000
    assert os.stat(at / "tmp").st_mtime == 1_500_000_000
    assert os.path.samefile(at / "same", at / "home/secret")
    assert os.stat(at / "zeros").st_blocks == 0
    assert os.stat(layer_store.directory + "/layers").st_mode & 0o777 == 0o700


async def test_whiteouts_become_those_of_the_kernel(layer_store: LayerStore) -> None:
    below = archive([folder("a"), file("a/gone"), folder("b"), file("b/gone")])
    await unpack(layer_store, below)
    layer = await unpack(
        layer_store,
        [
            folder("a"),
            file("a/.wh.gone"),
            folder("b"),
            file("b/.wh..wh..opq"),
            file("b/kept", b"1"),
            # A name that is hidden and made again, in either order.
            file(".wh.file"),
            file("file", b"new"),
            file(".wh.before"),
            folder("before"),
            folder("after"),
            file(".wh.after"),
            file(".wh..wh.plnk"),
            # Where nothing is below, the kernel would list these as files.
            folder("own"),
            file("own/.wh.nothing"),
            file("b/.wh.nothing"),
        ],
        below=[below],
    )
    at = Path(layer.path)
    assert is_whiteout(os.lstat(at / "a/gone"))
    assert (at / "file").read_text() == "new"
    opaque = []
    for name in ("a", "b", "before", "after"):
        fd = os.open(at / name, os.O_RDONLY)
        opaque.append(is_opaque(fd))
        os.close(fd)
    assert opaque == [False, True, True, True]
    assert sorted(os.listdir(at)) == ["a", "after", "b", "before", "file", "own"]
    assert (os.listdir(at / "own"), os.listdir(at / "b")) == ([], ["kept"])
    members = listed(await pack(layer_store, layer))
    assert {"a/.wh.gone", "b/.wh..wh..opq", "before/.wh..wh..opq"} <= set(members)
    assert await pack(layer_store, await unpack(layer_store, await pack(layer_store, layer)))


async def test_opaque_root_hides_all_below(layer_store: LayerStore) -> None:
    below = archive([folder("a"), file("a/x"), file("b"), folder("c")])
    await unpack(layer_store, below)
    layer = await unpack(layer_store, [file(".wh..wh..opq"), folder("a")], below=[below])
    at = Path(layer.path)
    assert all(is_whiteout(os.lstat(at / name)) for name in ("b", "c"))
    fd = os.open(at / "a", os.O_RDONLY)
    assert is_opaque(fd)
    os.close(fd)


async def test_missing_parents_are_as_in_the_layers_below(layer_store: LayerStore) -> None:
    """A made-up directory would hide the mode of the one below."""
    lowest = archive([folder("srv", 0o700, mtime=5), folder("srv/deep", 0o711), folder("x", 0o750)])
    middle = archive([file(".wh.x")])
    await unpack(layer_store, lowest)
    await unpack(layer_store, middle, below=[lowest])
    top = [file("srv/deep/file"), file("x/file"), file("new/file")]
    layer = await unpack(layer_store, top, below=[lowest, middle])
    at = Path(layer.path)
    modes = {name: stat.S_IMODE(os.stat(at / name).st_mode) for name in ("srv", "srv/deep", "x")}
    # The middle layer hides `x` of the lowest.
    assert modes == {"srv": 0o700, "srv/deep": 0o711, "x": 0o755}
    assert os.stat(at / "srv").st_mtime == 5
    assert layer.id != layer.diff_id
    other = await unpack(layer_store, top, below=[middle])
    assert stat.S_IMODE(os.stat(Path(other.path) / "srv").st_mode) == 0o755
    plain = archive(top)
    assert layer_store.find_layer(sha256(plain), [sha256(lowest), sha256(middle)]) == layer
    assert layer_store.find_layer(sha256(plain), [sha256(middle)]) == other
    assert layer_store.find_layer(sha256(plain)) is None


async def test_hard_link_to_a_file_of_a_layer_below_is_a_copy(layer_store: LayerStore) -> None:
    below = archive([folder("a"), file("a/x", b"data", mode=0o751, uid=6), symlink("l", "a/x")])
    await unpack(layer_store, below)
    layer = await unpack(layer_store, [hard_link("y", "a/x"), hard_link("m", "l")], below=[below])
    found = os.stat(Path(layer.path) / "y")
    assert (Path(layer.path) / "y").read_bytes() == b"data"
    assert stat.S_IMODE(found.st_mode) == 0o751
    assert os.readlink(Path(layer.path) / "m") == "a/x"
    assert listed(await pack(layer_store, layer))["y"][2] == 6


async def test_layer_waits_for_the_layer_that_it_depends_on(layer_store: LayerStore) -> None:
    below = archive([folder("srv", 0o700), file("big", random.Random(1).randbytes(1 << 20))])
    first = asyncio.create_task(
        layer_store.unpack(
            slowly(gzip.compress(below)),
            media_type="",
            digest="",
            diff_id=sha256(below),
        )
    )
    await asyncio.sleep(0)
    second = await unpack(layer_store, [file("srv/x")], below=[below])
    assert first.done()
    assert stat.S_IMODE(os.stat(Path(second.path) / "srv").st_mode) == 0o700


async def slowly(data: bytes) -> AsyncIterator[bytes]:
    async for chunk in chunks_of(data, 200_000):
        await asyncio.sleep(0.05)
        yield chunk


async def test_layer_without_the_one_it_depends_on_is_refused(layer_store: LayerStore) -> None:
    with pytest.raises(ImageError, match="not in the store") as caught:
        await unpack(layer_store, [file("srv/x")], below=[b"absent"])
    assert caught.value.reason == "missing"


def multi_member(data: bytes) -> bytes:
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:]) + bytes(100)


def skippable_zstd(data: bytes) -> bytes:
    frame = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    return frame + zstandard.compress(data[:1000]) + frame + zstandard.compress(data[1000:])


@pytest.mark.parametrize(
    "compress",
    [gzip.compress, multi_member, zstandard.compress, skippable_zstd, bytes],
    ids=["gzip", "several gzip members", "zstd", "zstd with skippable frames", "plain"],
)
@pytest.mark.parametrize("library", ["isal", "zlib"])
async def test_compression_is_detected(
    layer_store: LayerStore,
    compress: Callable[[bytes], bytes],
    library: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if library == "isal":
        pytest.importorskip("isal")
    else:
        monkeypatch.setattr(compression, "import_module", refuse_import)
    compression._gzip_library.cache_clear()
    plain = archive([file("x", random.Random(7).randbytes(300_000)), file("y", bytes(5 << 20))])
    layer = await unpack(layer_store, plain, blob=compress(plain))
    assert os.path.getsize(f"{layer.path}/y") == 5 << 20
    compression._gzip_library.cache_clear()


def refuse_import(name: str) -> object:
    raise ImportError(name)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, bytes])
@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-600], lambda data: data + b"x"])
async def test_altered_blob_is_refused(
    layer_store: LayerStore, compress: Callable[[bytes], bytes], damage: Callable[[bytes], bytes]
) -> None:
    plain = archive([file("x", random.Random(7).randbytes(50_000))])
    blob = compress(plain)
    with pytest.raises(ImageError, match="digest is") as caught:
        await unpack(layer_store, plain, blob=damage(blob), digest=sha256(blob))
    assert caught.value.reason == "mismatch"
    assert names_in(layer_store) == []


async def test_blob_of_another_layer_is_refused(layer_store: LayerStore) -> None:
    with pytest.raises(ImageError) as caught:
        await unpack(layer_store, [file("x")], diff_id=sha256(b"other"))
    assert caught.value.reason == "mismatch"
    assert names_in(layer_store) == []


@pytest.mark.parametrize(
    "data",
    [b"", b"\x1f\x8b", b"not a tar archive" * 100, gzip.compress(b"")],
    ids=["nothing", "two bytes", "text", "empty gzip"],
)
async def test_blob_that_is_no_archive_is_refused_or_empty(
    layer_store: LayerStore, data: bytes
) -> None:
    try:
        layer = await unpack(layer_store, data, blob=data, diff_id=sha256(b""))
    except ImageError:
        assert names_in(layer_store) == []
    else:
        assert os.listdir(layer.path) == []


async def test_archive_without_an_end_mark_is_complete(layer_store: LayerStore) -> None:
    """Its digest tells if it was cut short."""
    layer = await unpack(layer_store, archive([file("x", b"1" * 512)])[:1024])
    assert os.listdir(layer.path) == ["x"]


@pytest.mark.parametrize(
    ("limits", "what"),
    [({"max_bytes": 1999}, "bytes"), ({"max_files": 1}, "files")],
)
async def test_layer_over_a_limit_leaves_nothing(
    layer_store: LayerStore, limits: dict[str, Any], what: str
) -> None:
    members = [file("a", b"x" * 1000), file("b", b"x" * 1000)]
    with pytest.raises(LimitReached, match=what):
        await unpack(layer_store, members, **limits)
    assert names_in(layer_store) == []
    await unpack(layer_store, members, max_bytes=2000, max_files=2)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
async def test_bomb_ends_at_its_limit_in_bounded_memory(
    layer_store: LayerStore, compress: Callable[[bytes], bytes]
) -> None:
    """The zeros after the end mark are part of no file, and would go on for gigabytes."""
    plain = archive([file("x")])
    blob = compress(plain) + b"".join([compress(bytes(32 << 20))] * 40)
    with pytest.raises(LimitReached):
        await unpack(layer_store, plain, blob=blob, max_bytes=1 << 20, max_files=10)
    assert names_in(layer_store) == []


async def test_encrypted_layer_is_refused(layer_store: LayerStore) -> None:
    with pytest.raises(ImageError, match="encrypted"):
        await layer_store.unpack(
            chunks_of(b""),
            media_type="application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
            digest=sha256(b""),
            diff_id=sha256(b""),
        )


async def test_ids_that_no_sandbox_has_are_refused(layer_store: LayerStore) -> None:
    with pytest.raises(ImageError, match="70000"):
        await unpack(layer_store, [file("x", uid=70_000)])
    assert names_in(layer_store) == []


def names_in(layer_store: LayerStore) -> list[str]:
    """Return what the store has, finished or not."""
    path = Path(layer_store.directory, "layers")
    return [name for name in os.listdir(path) if name not in (".lock", ".users")]


@as_root
@pytest.mark.timeout(60)
def test_ordinary_user() -> None:
    rerun_as_nobody(__file__, "not bomb")
