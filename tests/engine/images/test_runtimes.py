"""Programs that come along: beneath an image, for everybody, and made once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.images.image import Image, Layer, LayerStore
from smokebox.engine.images.store import DENO, Runtimes

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGE = Image(name="x", digest="1", layers=(Layer(path="/usr", target="/usr"),))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "deno"
    path.write_text("#!/bin/sh\necho ran\n")
    path.chmod(0o755)
    return path


def refuse(*_: object) -> None:
    raise PermissionError


@pytest.mark.parametrize("link", [os.link, refuse])
async def test_a_program_lies_beneath_all_else(
    tmp_path: Path, program: Path, link: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", link)
    runtimes = Runtimes(LayerStore(str(tmp_path / "layer_store")), str(program))
    image = await runtimes.beneath(IMAGE)
    assert image.layers[:-1] == IMAGE.layers
    assert (image.layers[-1].target, image.digest != IMAGE.digest) == ("/", True)
    there = Path(image.layers[-1].path, DENO[1:])
    assert subprocess.run([there], capture_output=True, check=True).stdout == b"ran\n"
    assert all(os.stat(one).st_mode & 0o755 == 0o755 for one in (there, there.parent))
    assert await runtimes.beneath(IMAGE) == image


async def test_another_program_is_another_image(tmp_path: Path, program: Path) -> None:
    runtimes = Runtimes(LayerStore(str(tmp_path / "layer_store")), str(program))
    before = await runtimes.beneath(IMAGE)
    program.unlink()
    program.write_text("#!/bin/sh\necho other\n")
    assert (await runtimes.beneath(IMAGE)).digest != before.digest
    assert "ran" in Path(before.layers[-1].path, DENO[1:]).read_text()


async def test_without_a_program_an_image_stays_as_it_is(tmp_path: Path) -> None:
    assert await Runtimes(LayerStore(str(tmp_path)), None).beneath(IMAGE) is IMAGE
