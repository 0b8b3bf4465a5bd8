"""Generated Dockerfiles, built by us and by Debian's buildah: the trees are equal.

As an ordinary user all files belong to one id: there, what buildah built as root is compared
without owners, and no step changes an owner.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildah import Buildah
from building import Tree, build, tree
from engine.images.build.generated import Generator
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.host import Host

COUNT = 40 if os.environ.get("SMOKEBOX_SOAK") else 8

pytestmark = [
    pytest.mark.skipif(not shutil.which("buildah"), reason="buildah is not installed"),
    pytest.mark.timeout(120),
]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="buildah keeps owners for root only")

# A file with trees by seed, which root writes for the ordinary user.
TREES = "SMOKEBOX_ORACLE_TREES"
BLOCK = 4


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """A storage of buildah with the base image."""
    found = Buildah(tmp_path_factory.mktemp("buildah"))
    yield found
    found.close()


@as_root
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


@as_root
@pytest.mark.parametrize("first", range(0, COUNT, BLOCK))
def test_builds_as_an_ordinary_user_what_buildah_builds(oracle: Buildah, first: int) -> None:
    trees: dict[int, Tree] = {}
    for seed in range(first, first + BLOCK):
        generator = Generator(seed, chown=False)
        oracle.build(generator.text(), generator.files, f"plain:{seed}")
        trees[seed] = oracle.tree(f"plain:{seed}")
    with tempfile.NamedTemporaryFile(dir="/tmp") as file:
        pickle.dump(trees, file)
        file.flush()
        os.chmod(file.name, 0o644)
        rerun_as_nobody(__file__, "equals_the_trees", **{TREES: file.name})


@pytest.mark.skipif(TREES not in os.environ, reason="run by the test above")
async def test_an_ordinary_user_equals_the_trees(based: Host) -> None:
    expected: dict[int, Tree] = pickle.loads(Path(os.environ[TREES]).read_bytes())
    for seed, theirs in expected.items():
        generator = Generator(seed, chown=False)
        text = generator.text()
        built = await build(based, text, generator.files)
        ours = await tree(based, built.digest)
        assert {path: (*one[:2], one[4]) for path, one in ours.items()} == {
            path: (*one[:2], one[4]) for path, one in theirs.items()
        }, text
