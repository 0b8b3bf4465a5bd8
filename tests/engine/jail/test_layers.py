"""Jails on many layers, and on layers that are stored with the ids of another jail."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.engine.images.image import Layer
from smokebox.engine.images.store import open_store
from smokebox.engine.jail.gvisor import GvisorJailer
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.jail.spec import JailSpec
from smokebox.errors import AccessDenied
from smokebox.limits import Limits
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.jail.jail import Jailer

# Docker allows that many.
MOST = 127

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users")


@pytest_asyncio.fixture(
    params=["namespaces", pytest.param("gvisor", marks=pytest.mark.gvisor)],
)
async def jailer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Jailer]:
    tmp_path.chmod(0o700)
    jailer: Jailer = (
        NamespaceJailer()
        if request.param == "namespaces"
        else GvisorJailer(str(tmp_path / "interpreter"))
    )
    yield jailer
    await jailer.aclose()


async def make_spec(tmp_path: Path, layers: list[Layer]) -> JailSpec:
    image = await open_store(str(tmp_path / "images")).get("host")
    return JailSpec(
        key=f"l{secrets.token_hex(6)}",
        directory=str(tmp_path / "jail"),
        layers=(*layers, *image.layers),
        limits=Limits(),
    )


def make_layers(folder: Path, count: int) -> list[Layer]:
    """Return layers, the uppermost first; each has its own file and one that hides the last."""
    layers = []
    for number in range(count):
        path = folder / f"layer-{number}"
        path.mkdir(parents=True)
        (path / f"own-{number}").touch()
        (path / "shared").write_text(str(number))
        layers.append(Layer(path=str(path)))
    return layers[::-1]


def read(root: int, path: str) -> str:
    with open(os.open(path, os.O_RDONLY, dir_fd=root)) as file:
        return file.read()


async def test_jail_has_as_many_layers_as_docker_allows(jailer: Jailer, tmp_path: Path) -> None:
    spec = await make_spec(tmp_path, make_layers(tmp_path / "layers", MOST))
    jail = await jailer.make(spec)
    try:
        await jail.enter("box", Limits())
        assert {read(jail.root, f"own-{number}") for number in range(MOST)} == {""}
        assert read(jail.root, "shared") == str(MOST - 1)
    finally:
        await jail.kill()


async def test_request_with_long_paths_is_longer_than_a_message(
    jailer: Jailer, tmp_path: Path
) -> None:
    deep = tmp_path.joinpath("layers", *["d" * 200] * 4)
    spec = await make_spec(tmp_path, make_layers(deep, MOST))
    assert sum(len(layer.path) for layer in spec.layers) > 1 << 16
    jail = await jailer.make(spec)
    try:
        assert read(jail.root, "own-0") == ""
    finally:
        await jail.kill()


@as_root
async def test_layer_with_ids_of_another_jail_is_mapped(jailer: Jailer, tmp_path: Path) -> None:
    """Ids of a layer start at its owner; those outside of its range have no owner inside."""
    layers = make_layers(tmp_path / "layers", 3)
    for number, owner in enumerate((0x50010000, 0x50020000, 0)):
        for name, uid in (("root", 0), ("user", 1000), ("last", 65535), ("outside", 65536)):
            path = f"{layers[number].path}/{name}-{number}"
            Path(path).touch()
            os.chown(path, owner + uid, owner + uid)
        layers[number] = replace(layers[number], owner=owner)
    jail = await jailer.make(await make_spec(tmp_path, layers))
    try:
        for number in range(3):
            inside = [
                os.stat(f"{name}-{number}", dir_fd=jail.root).st_uid - jail.owner.uid
                for name in ("root", "user", "last")
            ]
            assert inside == [0, 1000, 65535]
            outside = os.stat(f"outside-{number}", dir_fd=jail.root)
            assert outside.st_uid == outside.st_gid == 65534
    finally:
        await jail.kill()


async def test_unreadable_interpreter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    python = tmp_path / "python"
    shutil.copy(sys.executable, python)
    python.chmod(0o111)
    monkeypatch.setattr(sys, "executable", str(python))
    jailer = NamespaceJailer()
    with pytest.raises(AccessDenied, match=r"cannot read the Python interpreter .*chmod") as caught:
        await jailer.make(await make_spec(tmp_path, []))
    assert caught.value.filename == str(python)
    monkeypatch.undo()
    jail = await jailer.make(await make_spec(tmp_path, []))
    await jail.kill()
    await jailer.aclose()


@as_root
@pytest.mark.timeout(60)
def test_ordinary_user() -> None:
    rerun_as_nobody(__file__, "docker_allows or long_paths or unreadable")
