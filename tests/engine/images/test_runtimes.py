"""Runtimes of Smokebox as the lowest layer of an image."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.images.image import Image, Layer
from smokebox.engine.images.layer_store import LayerStore
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
async def test_runtime_is_in_the_lowest_layer(
    tmp_path: Path, program: Path, link: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", link)
    runtimes = Runtimes(LayerStore(str(tmp_path / "layer_store")), str(program))
    image = await runtimes.add_to(IMAGE)
    assert image.layers[:-1] == IMAGE.layers
    # The digest is that of the image alone: sandboxes keep it when the runtime changes.
    assert (image.layers[-1].target, image.digest) == ("/", IMAGE.digest)
    deno = Path(image.layers[-1].path, DENO[1:])
    assert subprocess.run([deno], capture_output=True, check=True).stdout == b"ran\n"
    assert all(os.stat(path).st_mode & 0o755 == 0o755 for path in (deno, deno.parent))
    assert await runtimes.add_to(IMAGE) == image


async def test_changed_program_has_another_layer(tmp_path: Path, program: Path) -> None:
    runtimes = Runtimes(LayerStore(str(tmp_path / "layer_store")), str(program))
    before = await runtimes.add_to(IMAGE)
    program.unlink()
    program.write_text("#!/bin/sh\necho other\n")
    assert (await runtimes.add_to(IMAGE)).layers != before.layers
    assert "ran" in Path(before.layers[-1].path, DENO[1:]).read_text()


async def test_image_is_unchanged_without_a_runtime(tmp_path: Path) -> None:
    assert await Runtimes(LayerStore(str(tmp_path)), None).add_to(IMAGE) is IMAGE
