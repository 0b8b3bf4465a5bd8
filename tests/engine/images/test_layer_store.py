"""The store of image layers: concurrent engines, killed engines, removal, adopted layers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.images.layer_tools import archive, chunks_of, file, folder, sha256, tree, unpack
from smokebox.engine.images.layer_store import LayerStore
from smokebox.errors import ImageError, PathError
from unprivileged import CHECKOUT, rerun_as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users")

LAYER = archive([folder("a"), file("a/x", b"data" * 1000)])


def names_in(store: LayerStore) -> list[str]:
    path = Path(store.directory, "layers")
    return sorted(name for name in os.listdir(path) if name not in (".lock", ".users"))


async def unread(started: list[bool]) -> AsyncIterator[bytes]:
    started.append(True)
    yield b""


async def test_complete_layer_is_not_read_again(layer_store: LayerStore) -> None:
    layer = await unpack(layer_store, LAYER)
    started: list[bool] = []
    again = await layer_store.unpack(
        unread(started), media_type="", digest="", diff_id=sha256(LAYER)
    )
    assert (again, started) == (layer, [])
    assert layer_store.get(layer.id) == layer_store.find_layer(sha256(LAYER)) == layer
    assert (layer.diff_id, layer.files) == (sha256(LAYER), 2)
    assert layer.bytes


async def test_concurrent_calls_unpack_a_layer_once(layer_store: LayerStore) -> None:
    read = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal read
        async for chunk in chunks_of(LAYER, 1000):
            read += len(chunk)
            await asyncio.sleep(0)
            yield chunk

    calls = [
        layer_store.unpack(counted(), media_type="", digest="", diff_id=sha256(LAYER))
        for _ in range(5)
    ]
    layers = await asyncio.gather(*calls)
    assert (len({layer.path for layer in layers}), read) == (1, len(LAYER))


async def test_layer_without_its_parents_is_unpacked_beside_those_below(
    layer_store: LayerStore,
) -> None:
    """It reads the metadata of `usr` from the layer below, but only at its end."""
    below = archive([folder("usr", 0o711), file("usr/a")])
    above = archive([file(f"usr/{number}", b"x" * 5000) for number in range(50)])
    above_was_read = asyncio.Event()

    async def lower() -> AsyncIterator[bytes]:
        await above_was_read.wait()
        yield below

    async def upper() -> AsyncIterator[bytes]:
        async for chunk in chunks_of(above):
            yield chunk
        above_was_read.set()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        first = layer_store.unpack(lower(), media_type="", digest="", diff_id=sha256(below))
        group.create_task(first)
        second = layer_store.unpack(
            upper(), media_type="", digest="", diff_id=sha256(above), below=[sha256(below)]
        )
        task = group.create_task(second)
    assert Path(task.result().path, "usr").stat().st_mode & 0o777 == 0o711


async def test_call_takes_over_from_one_that_failed(layer_store: LayerStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield LAYER[:1000]
        await asyncio.sleep(0.1)
        raise ConnectionResetError("the registry went away")

    first = asyncio.ensure_future(
        layer_store.unpack(broken(), media_type="", digest="", diff_id=sha256(LAYER))
    )
    await asyncio.sleep(0)
    layer = await unpack(layer_store, LAYER)
    with pytest.raises(ConnectionResetError):
        await first
    assert names_in(layer_store) == [os.path.basename(os.path.dirname(layer.path))]


async def test_cancelled_call_leaves_nothing(layer_store: LayerStore) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield LAYER[:1000]
        await asyncio.sleep(100)

    call = asyncio.ensure_future(
        layer_store.unpack(endless(), media_type="", digest="", diff_id=sha256(LAYER))
    )
    await asyncio.sleep(0.3)
    assert [name.startswith(".making-") for name in names_in(layer_store)] == [True]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert names_in(layer_store) == []


KILLED = """
    import asyncio, sys
    from engine.images.layer_tools import *
    from smokebox.engine.images.layer_store import LayerStore

    async def main():
        store = LayerStore(sys.argv[1] + "/images", home=sys.argv[1])
        plain = archive([file(f"d/{n}", b"x" * 500) for n in range(200_000)])

        async def chunks():
            print("ready", flush=True)
            async for chunk in chunks_of(plain):
                yield chunk

        await store.unpack(chunks(), media_type="", digest="", diff_id=sha256(plain))

    asyncio.run(main())
"""


@pytest.mark.timeout(60)
async def test_killed_engine_leaves_nothing_that_is_used(
    layer_store: LayerStore, tmp_path: Path
) -> None:
    await unpack(layer_store, LAYER)
    home = tmp_path / "home"
    source = ":".join([f"{CHECKOUT}/src", f"{CHECKOUT}/tests", *filter(None, sys.path)])
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(home)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": source}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    unfinished = home / "images/layers"
    while not list(unfinished.glob(".making-*/files/d/*")):
        assert process.poll() is None
        await asyncio.sleep(0.01)
    # Another engine's prune leaves alone what is being unpacked.
    await layer_store.prune([sha256(LAYER)])
    assert len(names_in(layer_store)) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(names_in(layer_store)) == 2
    await layer_store.prune([sha256(LAYER)])
    assert names_in(layer_store) == [sha256(LAYER).replace(":", "-")]


async def test_prune_removes_what_is_not_kept(layer_store: LayerStore) -> None:
    kept = await unpack(layer_store, LAYER)
    other = await unpack(layer_store, [file("y", b"1" * 100_000)])
    result = await layer_store.prune([kept.id])
    assert (result.layers, result.bytes >= 100_000) == (1, True)
    assert (layer_store.get(kept.id), layer_store.get(other.id)) == (kept, None)


async def test_lease_keeps_layers(layer_store: LayerStore) -> None:
    found = await unpack(layer_store, LAYER)
    with layer_store.lease():
        assert layer_store.find_layer(sha256(LAYER)) == found
        unpacked = await unpack(layer_store, [file("y")])
        await layer_store.prune([])
        assert layer_store.get(unpacked.id) == unpacked
        assert layer_store.get(found.id) == found
    await layer_store.prune([])
    assert names_in(layer_store) == []


async def test_layers_of_another_engine_stay_while_its_state_directory_exists(
    layer_store: LayerStore, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = LayerStore(layer_store.directory, home=str(tmp_path / "other"))
    layer = await unpack(other, LAYER)
    await layer_store.prune([])
    assert other.get(layer.id) == layer
    assert layer_store.get(layer.id) == layer
    await other.prune([])
    # This one registered it meanwhile.
    assert layer_store.get(layer.id) == layer
    other.get(layer.id)
    (tmp_path / "other").rmdir()
    await layer_store.prune([])
    assert layer_store.get(layer.id) is None
    other.close()


@pytest.mark.parametrize("id", ["../../etc", "sha256:../x", "", ".lock", "sha256:" + "0" * 63])
def test_id_that_is_none_leads_nowhere(layer_store: LayerStore, id: str) -> None:
    with pytest.raises(ImageError):
        layer_store.get(id)


async def test_store_in_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = LayerStore(str(tmp_path / "file"))
    with pytest.raises(PathError, match="file"):
        await unpack(store, LAYER)
    store.close()


def make_upper(path: Path) -> None:
    """Fill the upper directory of a sandbox, as the kernel leaves it."""
    (path / "etc").mkdir(parents=True)
    for name in ("hosts", "hostname", "resolv.conf", "own"):
        (path / "etc" / name).write_text(name)
    (path / "new").mkdir(mode=0o755)
    os.setxattr(path / "new", "user.overlay.opaque", b"y")
    os.setxattr(path / "etc", "user.overlay.origin", b"x")
    (path / "new/file").write_bytes(b"1")
    os.link(path / "new/file", path / "new/linked")
    os.mknod(path / "gone", 0o020000)


async def test_adopted_layer_is_the_moved_directory(
    layer_store: LayerStore, tmp_path: Path
) -> None:
    upper = tmp_path / "home/boxes/upper"
    make_upper(upper)
    inode = upper.stat().st_ino
    id = layer_store.new_layer_id()
    layer = await layer_store.adopt(str(upper), id=id, owner=0x50010000)
    assert (os.stat(layer.path).st_ino, upper.exists(), layer.owner) == (inode, False, 0x50010000)
    # As after a crash before the next step was recorded.
    assert await layer_store.adopt(str(upper), id=id, owner=0x50010000) == layer
    assert layer.diff_id is None
    measured = await layer_store.measure(layer)
    assert measured.files
    assert layer_store.get(id) == measured


async def test_archive_of_an_adopted_layer(layer_store: LayerStore, tmp_path: Path) -> None:
    upper = tmp_path / "home/upper"
    make_upper(upper)
    owner = 0x50010000 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() == 0:
        for path in (upper, *upper.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)
        os.chown(upper / "etc/own", owner + 1000, owner + 100)
    layer = await layer_store.adopt(str(upper), id=layer_store.new_layer_id(), owner=owner)
    packed = b"".join([chunk async for chunk in layer_store.pack(layer)])
    found = layer_store.get(layer.id)
    assert found is not None
    assert found.diff_id == sha256(packed)
    assert b"".join([chunk async for chunk in layer_store.pack(found)]) == packed
    again = tree((await unpack(layer_store, packed)).path)
    # Files that every sandbox has of its own are not part of it.
    assert set(again) == {"etc", "etc/own", "new", "new/file", "new/linked", "gone"}
    if os.geteuid() == 0:
        assert {at[2:4] for name, at in again.items() if name != "etc/own"} == {(0, 0)}
        assert again["etc/own"][2:4] == (1000, 100)
    listed = os.listxattr(f"{layer_store.get(sha256(packed)).path}/new")  # type: ignore[union-attr]
    assert listed == ["user.overlay.opaque"]


@as_root
@pytest.mark.timeout(60)
def test_ordinary_user() -> None:
    rerun_as_nobody(__file__, "not ordinary")
