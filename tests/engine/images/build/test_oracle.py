"""Generated Dockerfiles, built by us and by Debian's buildah: the trees are equal."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from buildah import Buildah
from building import build, tree
from engine.images.build.generated import Generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.host import Host

COUNT = 40 if os.environ.get("SMOKEBOX_SOAK") else 8

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="buildah keeps owners for root only"),
    pytest.mark.skipif(not shutil.which("buildah"), reason="buildah is not installed"),
    pytest.mark.timeout(60),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """A storage of buildah with the base image."""
    found = Buildah(tmp_path_factory.mktemp("buildah"))
    yield found
    found.close()


@pytest.mark.parametrize("seed", range(COUNT))
async def test_builds_the_tree_that_buildah_builds(based: Host, oracle: Buildah, seed: int) -> None:
    generator = Generator(seed)
    text = generator.text()
    oracle.build(text, generator.files, f"generated:{seed}")
    built = await build(based, text, generator.files)
    ours, theirs = await tree(based, built.digest), oracle.tree(f"generated:{seed}")
    different = {
        path: (ours.get(path), theirs.get(path))
        for path in ours.keys() | theirs.keys()
        if ours.get(path) != theirs.get(path)
    }
    assert not different, text
