"""Layers that try to reach what is outside of them. They write nothing there and leave nothing."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.images.layer_tools import (
    Member,
    archive,
    file,
    folder,
    hard_link,
    sha256,
    symlink,
    tree,
    unpack,
)
from smokebox.errors import ImageError, LimitReached, SmokeboxError
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from smokebox.engine.images.layer_store import LayerStore

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users")


def sparse(name: str) -> bytes:
    """Return an archive of a sparse file that claims a petabyte."""
    info = tarfile.TarInfo(name)
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": str(1 << 50),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    return buffer.getvalue()


def claiming(size: int) -> bytes:
    """Return an archive with a file that claims more bytes than follow."""
    info = tarfile.TarInfo("large")
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


REFUSED: dict[str, list[Member] | bytes] = {
    "parent": [file("../outside/new", b"x")],
    "parent in the middle": [file("a/../../outside/new", b"x")],
    "parent as a directory": [folder("..", 0o777)],
    "hidden parent": [file(".wh...", b"")],
    "hidden self": [file(".wh..", b"")],
    "empty whiteout": [file(".wh.", b"")],
    "below a whiteout": [file(".wh.a/b", b"")],
    "below an absolute symlink": [symlink("l", "{outside}"), file("l/new", b"x")],
    "below a relative symlink": [symlink("l", "../../../../outside"), file("l/new", b"x")],
    "below a symlink to the root": [symlink("l", "/"), file("l/etc/new", b"x")],
    "below a symlink of a symlink": [symlink("m", "l"), symlink("l", "{outside}"), file("m/new")],
    "whiteout below a symlink": [symlink("l", "{outside}"), file("l/.wh.kept")],
    "opaque below a symlink": [symlink("l", "{outside}"), file("l/.wh..wh..opq")],
    "directory below a symlink": [symlink("l", "{outside}"), folder("l/new")],
    "hard link out by a parent": [hard_link("h", "../../../../outside/kept")],
    "hard link out by an absolute name": [hard_link("h", "{outside}/kept")],
    "hard link through a symlink": [symlink("l", "{outside}"), hard_link("h", "l/kept")],
    "hard link to a directory": [folder("d"), hard_link("h", "d")],
    "hard link to a whiteout": [file(".wh.w"), hard_link("h", "w")],
    "hard link to itself": [hard_link("h", "h")],
    "whiteout of the kernel": [Member("w", kind=tarfile.CHRTYPE)],
    "unknown type": [Member("u", kind=b"V")],
    "name longer than a path": [file("d/" * 3000 + "x")],
    "long component": [file("n" * 300)],
    "child of a file": [file("f"), file("f/x")],
    "sparse bomb": sparse("bomb"),
    "size beyond the end": claiming(1 << 40),
    "negative id": [file("x", uid=-1)],
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the store, with a file that is to stay as it is."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "kept").write_text("kept")
    return path


def aimed(layer: list[Member] | bytes, outside: Path) -> bytes:
    if isinstance(layer, bytes):
        return layer
    for member in layer:
        member.link = member.link.replace("{outside}", str(outside))
    return archive(layer)


def all_but_store(tmp_path: Path) -> dict[str, tuple[object, ...]]:
    return {name: at for name, at in tree(tmp_path, times=False).items() if "home/" not in name}


def left(store: LayerStore) -> list[str]:
    names = os.listdir(Path(store.directory, "layers"))
    return [name for name in names if name not in (".lock", ".users")]


@pytest.mark.parametrize("name", REFUSED)
async def test_hostile_layer_is_refused_and_leaves_nothing(
    name: str, layer_store: LayerStore, outside: Path, tmp_path: Path
) -> None:
    layer = aimed(REFUSED[name], outside)
    before = all_but_store(tmp_path)
    with pytest.raises(SmokeboxError) as caught:
        await unpack(layer_store, layer, max_bytes=1 << 30)
    assert isinstance(caught.value, (ImageError, LimitReached, OSError))
    assert caught.value.hint or caught.value.message
    assert all_but_store(tmp_path) == before
    assert left(layer_store) == []


HARMLESS: dict[str, list[Member]] = {
    "absolute name": [file("/etc/new", b"x")],
    "doubled slashes": [file("//a//./b", b"x")],
    "symlink out": [symlink("l", "{outside}/kept")],
    "symlink replaced by a file": [symlink("f", "{outside}/kept"), file("f", b"x")],
    "symlink replaced by a directory": [
        symlink("d", "{outside}"),
        folder("d", 0o700),
        file("d/new", b"x"),
    ],
    "file replaced by a symlink": [file("f"), symlink("f", "{outside}/kept")],
    "directory replaced by a symlink": [folder("d"), file("d/x"), symlink("d", "{outside}")],
    "symlink replaced by a hard link": [
        file("f"),
        symlink("h", "{outside}/kept"),
        hard_link("h", "f"),
    ],
    "symlink hidden": [symlink("l", "{outside}"), file(".wh.l")],
    "the same name often": [file("f", str(n).encode()) for n in range(50)],
    "one name of two linked files written again": [
        file("f", b"1"),
        hard_link("g", "f"),
        file("f", b"2"),
    ],
    "attributes of overlays": [
        folder(
            "d",
            xattrs={
                "user.overlay.opaque": "y",
                "trusted.overlay.opaque": "y",
                "user.overlay.redirect": "/outside",
                "user.overlay.whiteout": "y",
                "user.smokebox.owner": "0:0",
            },
        )
    ],
    "attributes of security": [file("f", xattrs={"security.selinux": "x", "trusted.x": "y"})],
    "fifo": [Member("p", kind=tarfile.FIFOTYPE)],
    "device of a disk": [Member("d", kind=tarfile.BLKTYPE, device=(8, 0), mode=0o666)],
    "setuid": [file("s", mode=0o6777)],
    "unreadable": [folder("d", 0), file("d/x", mode=0)],
    "a deep tree": [file("d/" * 300 + "x")],
    "a link with content": [Member("l", b"", kind=tarfile.SYMTYPE, link="x")],
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_odd_layer_stays_inside(
    name: str, layer_store: LayerStore, outside: Path, tmp_path: Path
) -> None:
    layer = aimed(HARMLESS[name], outside)
    before = all_but_store(tmp_path)
    stored = await unpack(layer_store, layer)
    assert all_but_store(tmp_path) == before
    for folder_name, folders, files in os.walk(stored.path):
        for one in (*folders, *files):
            path = os.path.join(folder_name, one)
            names = os.listxattr(path, follow_symlinks=False)
            assert not [n for n in names if n.startswith(("user.overlay", "trusted", "security"))]
    assert [chunk async for chunk in layer_store.pack(stored)]
    await layer_store.prune(())
    assert left(layer_store) == []


async def test_kept_of_odd_layers(layer_store: LayerStore, outside: Path) -> None:
    async def unpacked(name: str) -> Path:
        return Path((await unpack(layer_store, aimed(HARMLESS[name], outside))).path)

    assert (await unpacked("absolute name") / "etc/new").read_bytes() == b"x"
    assert (await unpacked("symlink replaced by a file") / "f").read_bytes() == b"x"
    assert (await unpacked("symlink replaced by a directory") / "d/new").read_bytes() == b"x"
    assert (await unpacked("the same name often") / "f").read_bytes() == b"49"
    linked = await unpacked("one name of two linked files written again")
    assert ((linked / "f").read_bytes(), (linked / "g").read_bytes()) == (b"2", b"1")
    setuid = (await unpacked("setuid") / "s").stat()
    assert setuid.st_mode & 0o7777 == 0o6777


async def test_member_below_a_symlink_of_a_layer_below_is_refused(layer_store: LayerStore) -> None:
    below = archive([symlink("lib", "usr/lib"), folder("usr/lib")])
    await unpack(layer_store, below)
    with pytest.raises(ImageError, match="symlink of a layer below"):
        await unpack(layer_store, [file("lib/x")], below=[below])
    with pytest.raises(SmokeboxError):
        await unpack(layer_store, [hard_link("h", "lib/x")], below=[below])
    assert len(left(layer_store)) == 1


async def test_many_names_of_deep_directories_end_at_the_limit(layer_store: LayerStore) -> None:
    members = [file(f"{n}/" + "d/" * 300 + "x") for n in range(20)]
    with pytest.raises(LimitReached):
        await unpack(layer_store, members, max_files=5000)
    assert left(layer_store) == []


async def test_every_cut_of_an_archive_is_refused(layer_store: LayerStore) -> None:
    members: list[Any] = [folder("d"), file("d/x", b"1" * 3000), symlink("l", "d/x")]
    plain = archive(members)
    for size in range(0, len(plain) - 9000, 500):
        with pytest.raises(ImageError):
            await unpack(layer_store, plain, blob=gzip.compress(plain[:size], 1), digest="")
    assert left(layer_store) == []
    assert await unpack(layer_store, plain, digest="", blob=plain, diff_id=sha256(plain))


@as_root
@pytest.mark.timeout(60)
def test_ordinary_user() -> None:
    rerun_as_nobody(__file__, "not ordinary")
