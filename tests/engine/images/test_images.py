"""Images loaded from files: sandboxes that start from them, pinned digests, removal."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from engine.images.layer_tools import archive, file, folder, sha256
from engine.images.oci_tools import (
    MANIFEST,
    Layout,
    config_of,
    docker_archive,
    small_base,
    tar_directory,
)
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.errors import (
    Conflict,
    ImageError,
    NotFound,
    PathError,
    PathNotFound,
    RegistryError,
    SmokeboxError,
)
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users")

APP = archive([folder("srv"), file("srv/app", b"1"), file("etc/hosts", b"the image's")])


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    # Nothing listens there: an unknown image is not looked for in the network.
    offline = RegistrySettings(default="127.0.0.1:1")
    async with await Host.open(tmp_path / "home", pool=0, registries=offline) as host:
        yield host


async def load(host: Host, layout: Layout, **settings: object) -> str:
    layers = [small_base(), APP]
    digest = layout.add("app:1", layers, config_of(layers, **settings))
    await host.images.load_oci(layout.path)
    return digest


async def test_sandbox_starts_from_an_image(host: Host, layout: Layout) -> None:
    digest = await load(
        host, layout, Env=["COLOR=red", "PATH=/bin"], WorkingDir="/srv", User="worker"
    )
    sandbox = host.sandbox("box", image="app:1")
    result = await sandbox.exec("pwd; id -un; echo $COLOR $PATH; cat app; ls -d /workspace")
    # An engine of an ordinary user has one id, which is that of root inside.
    user = "worker" if os.geteuid() == 0 else "root"
    assert (result.stdout, result.stderr) == (f"/srv\n{user}\nred /bin\n1/workspace\n", "")
    assert (await sandbox.read_bytes("/etc/hosts")).startswith(b"127.0.0.1")
    assert (await sandbox.exec("cat /etc/hostname")).stdout == "box\n"
    info = await host.images.inspect("app:1")
    assert (info.digest, info.names, info.layers, info.source) == (digest, ("app:1",), 2, "oci")
    assert info.used_at >= info.created_at > 0
    assert info.size > 100_000


async def test_image_without_settings_has_the_defaults(host: Host, layout: Layout) -> None:
    await load(host, layout)
    sandbox = host.sandbox("box", image="app:1")
    assert (await sandbox.exec("pwd; id -u")).stdout == "/workspace\n0\n"
    assert "/usr/local/bin" in (await sandbox.exec("echo $PATH")).stdout


async def test_scratch_image_has_mount_points_and_files_of_ours(host: Host, layout: Layout) -> None:
    layout.add("empty", [archive([file("only", b"1")])])
    await host.images.load_oci(layout.path)
    sandbox = host.sandbox("box", image="empty")
    ours = {"dev", "etc", "proc", "run", "sys", "tmp", "workspace"}
    assert ours | {"only"} <= set(await sandbox.readdir("/"))


async def test_known_image_starts_without_its_source(tmp_path: Path, layout: Layout) -> None:
    """Also with another engine, and after the name has moved to another image."""
    async with await Host.open(tmp_path / "home", pool=0) as host:
        await load(host, layout)
        await host.sandbox("old", image="app:1").exec("echo kept > /workspace/file")
    shutil.rmtree(layout.path)
    async with await Host.open(tmp_path / "home", pool=0) as host:
        assert (await host.sandbox("new", image="app:1").exec("cat /srv/app")).stdout == "1"
        other = Layout(tmp_path / "other")
        other.add("app:1", [small_base(), archive([file("srv/app", b"2")])])
        await host.images.load_oci(other.path)
        assert (await host.sandbox("third", image="app:1").exec("cat /srv/app")).stdout == "2"
        old = await host.sandbox("old").exec("cat /srv/app /workspace/file")
        assert old.stdout == "1kept\n"
        await host.aclose(detach=True)
    async with await Host.open(tmp_path / "home", pool=0) as host:
        assert [info.status for info in await host.list(status="active")] == ["active"] * 3
        assert (await host.sandbox("old").exec("cat /srv/app")).stdout == "1"
        for name in ("old", "new", "third"):
            await host.sandbox(name).destroy()


async def test_image_in_use_is_not_removed(host: Host, layout: Layout) -> None:
    digest = await load(host, layout)
    sandbox = host.sandbox("box", image="app:1")
    await sandbox.exec("true")
    await sandbox.sleep()
    with pytest.raises(Conflict, match="sandbox box"):
        await host.images.remove(digest)
    await host.images.remove("app:1")
    await host.images.prune()
    assert (await sandbox.exec("cat /srv/app")).stdout == "1"
    with pytest.raises(RegistryError):
        await host.sandbox("other", image="app:1").exec("true")
    await sandbox.destroy()
    result = await host.images.prune()
    assert (result.layers, await host.images.list()) == (2, [])


async def test_removed_image_takes_only_its_own_layers(host: Host, layout: Layout) -> None:
    await load(host, layout)
    layout.manifests.clear()
    layout.add("other", [small_base()])
    await host.images.load_oci(layout.path)
    await host.images.remove("app:1")
    assert [info.names for info in await host.images.list()] == [("other",)]
    assert (await host.sandbox("box", image="other").exec("echo ran")).stdout == "ran\n"


async def test_image_of_a_scope_starts_for_its_sandboxes_only(host: Host, layout: Layout) -> None:
    digest = layout.add("app", [small_base()])
    await host.images.load_oci(layout.path, names=["mine"], scope="team-a-")
    assert (await host.sandbox("team-a-1", image="mine").exec("echo ran")).stdout == "ran\n"
    for name in ("mine", digest):
        with pytest.raises((NotFound, RegistryError)):
            await host.sandbox("team-b-1", image=name).exec("true")
    assert await host.images.list(scope="team-b-") == []
    assert len(await host.images.list(scope="team-a-")) == 1


async def test_pool_holds_no_jails_of_removed_layers(tmp_path: Path, layout: Layout) -> None:
    async with await Host.open(tmp_path / "home", pool=1) as host:
        await load(host, layout)
        await host.sandbox("box", image="app:1").exec("true")
        await host.sandbox("box").destroy()
        await host.images.remove("app:1")
        await host.images.load_oci(layout.path)
        assert (await host.sandbox("box", image="app:1").exec("cat /srv/app")).stdout == "1"


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("linked", [False, True], ids=["files", "links"])
async def test_archive_of_docker_save(
    host: Host, tmp_path: Path, compress: Any, *, linked: bool
) -> None:
    images = {"one:1": [small_base(), APP], "two:1": [small_base()]}
    path = tmp_path / "saved.tar"
    path.write_bytes(compress(docker_archive(images, linked=linked)))
    loaded = await host.images.load_archive(path)
    assert [info.names for info in loaded] == [("one:1",), ("two:1",)]
    path.unlink()
    assert (await host.sandbox("box", image="one:1").exec("cat /srv/app")).stdout == "1"
    assert os.listdir(tmp_path) == ["home"]


async def test_archive_of_a_layout(host: Host, layout: Layout, tmp_path: Path) -> None:
    layout.add("", [small_base(), APP])
    path = tmp_path / "layout.tar"
    path.write_bytes(tar_directory(layout.path))
    [info] = await host.images.load_archive(path, names=["mine"])
    assert info.names == ("mine",)
    assert (await host.sandbox("box", image="mine").exec("cat /srv/app")).stdout == "1"


async def test_image_of_127_layers(host: Host, layout: Layout) -> None:
    layers = [small_base(), *(archive([file(f"n{n}", str(n).encode())]) for n in range(126))]
    layout.add("many", layers)
    await host.images.load_oci(layout.path)
    sandbox = host.sandbox("box", image="many")
    assert (await sandbox.exec("cat /n0 /n125")).stdout == "0125"


async def test_several_images_need_a_reference(host: Host, layout: Layout) -> None:
    layout.add("a", [APP])
    layout.add("b", [APP, archive([file("b")])])
    with pytest.raises(NotFound, match="a, b"):
        await host.images.load_oci(layout.path)
    with pytest.raises(NotFound, match="a, b"):
        await host.images.load_oci(layout.path, reference="c")
    info = await host.images.load_oci(layout.path, reference="b")
    assert (info.names, info.layers) == (("b",), 2)


async def test_image_for_this_machine_is_chosen(host: Host, layout: Layout) -> None:
    other = config_of([small_base()]) | {"architecture": "sparc"}
    layout.add("", [small_base()], other)
    layout.add("", [APP])
    manifests = layout.manifests
    for entry, architecture in zip(manifests, ("sparc", host_machine()), strict=True):
        entry["platform"] = {"os": "linux", "architecture": architecture}
    index = {"schemaVersion": 2, "manifests": manifests}
    layout.manifests = [layout.document(index, "application/vnd.oci.image.index.v1+json")]
    layout.write_index()
    info = await host.images.load_oci(layout.path, names=["x"])
    assert info.layers == 1
    manifests.pop()
    layout.manifests = [layout.document(index, "application/vnd.oci.image.index.v1+json")]
    layout.write_index()
    with pytest.raises(NotFound, match="linux/sparc"):
        await host.images.load_oci(layout.path)


def host_machine() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


async def test_image_for_another_machine_is_refused(host: Host, layout: Layout) -> None:
    layout.add("x", [APP], config_of([APP]) | {"architecture": "sparc"})
    with pytest.raises(NotFound, match="sparc"):
        await host.images.load_oci(layout.path)


def change(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


async def test_altered_files_of_a_layout_are_refused(host: Host, layout: Layout) -> None:
    layout.add("x", [APP])
    blobs = sorted((layout.path / "blobs/sha256").iterdir())
    for blob in blobs:
        data = blob.read_bytes()
        blob.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(ImageError) as caught:
            await host.images.load_oci(layout.path)
        assert caught.value.reason == "mismatch", blob
        blob.write_bytes(data)
        blob.rename(f"{blob}.away")
        with pytest.raises(ImageError):
            await host.images.load_oci(layout.path)
        Path(f"{blob}.away").rename(blob)
    assert await host.images.list() == []
    await host.images.load_oci(layout.path)


@pytest.mark.parametrize(
    "index",
    [
        "no JSON",
        "[" * 100_000,
        "[]",
        '{"manifests": 1}',
        '{"manifests": [1]}',
        json.dumps({"manifests": [{"digest": "sha256:../../../../etc/passwd"}]}),
        json.dumps({"manifests": [{"digest": "sha256:" + "0" * 64, "mediaType": MANIFEST}]}),
    ],
    ids=range(7),
)
async def test_damaged_index_is_refused(host: Host, layout: Layout, index: str) -> None:
    (layout.path / "index.json").write_text(index)
    with pytest.raises(SmokeboxError) as caught:
        await host.images.load_oci(layout.path)
    assert caught.value.hint


async def test_links_of_a_layout_lead_nowhere(host: Host, layout: Layout, tmp_path: Path) -> None:
    layout.add("x", [APP])
    blobs = layout.path / "blobs/sha256"
    (tmp_path / "outside").mkdir()
    for blob in blobs.iterdir():
        shutil.copy(blob, tmp_path / "outside")
    shutil.rmtree(blobs)
    blobs.symlink_to(tmp_path / "outside")
    with pytest.raises((PathError, ImageError)):
        await host.images.load_oci(layout.path)
    os.unlink(layout.path / "index.json")
    os.mkfifo(layout.path / "index.json")
    with pytest.raises(PathError):
        await host.images.load_oci(layout.path)


async def test_paths_that_are_no_images(host: Host, tmp_path: Path) -> None:
    with pytest.raises(PathNotFound):
        await host.images.load_oci(tmp_path / "absent")
    with pytest.raises(PathNotFound, match=r"index\.json"):
        await host.images.load_oci(tmp_path)
    (tmp_path / "text").write_text("no archive" * 1000)
    with pytest.raises(ImageError, match="docker save"):
        await host.images.load_archive(tmp_path / "text")
    (tmp_path / "empty.tar").write_bytes(archive([]))
    with pytest.raises(PathNotFound, match=r"manifest.json or index.json"):
        await host.images.load_archive(tmp_path / "empty.tar")
    with pytest.raises(PathError):
        await host.images.load_archive(tmp_path)
    with pytest.raises(NotFound):
        await host.images.inspect("absent")
    with pytest.raises(NotFound):
        await host.images.remove(sha256(b"absent"))


@as_root
@pytest.mark.timeout(90)
def test_ordinary_user() -> None:
    rerun_as_nobody(__file__, "starts or docker_save or scratch or known or 127 or pool")
