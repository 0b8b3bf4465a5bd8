"""SIGKILL of the engine while it pulls an image.

An image is known as a whole or not at all, and layers that were complete are not downloaded again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oci_images import TestImage, tar
from registry_server import RegistryServer, run_registry
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import (
    RegistryAccess,
    RegistryConfig,
    RegistrySettings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src"
TRIES = int(os.environ.get("SMOKEBOX_CRASH_TRIES", "6"))
pytestmark = pytest.mark.timeout(60 + 15 * TRIES)

# With `kill_at`, the process kills itself at that executed line of the traced files; otherwise it
# prints how many there were.
PROGRAM = """
import asyncio, os, sys, threading
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import *

home, authority, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
TRACED = ("images/catalog.py", "images/chunk_pipe.py")
PARTS = ("images/registry/", "images/layer_")
lines = 0

def trace(frame, event, argument):
    name = frame.f_code.co_filename
    return step if name.endswith(TRACED) or any(part in name for part in PARTS) else None

def step(frame, event, argument):
    global lines
    lines += event == "line"
    if kill_at and lines >= kill_at:
        os.kill(os.getpid(), 9)
    return step

async def main():
    config = RegistryConfig(plain_http=True)
    settings = RegistrySettings(registries={authority: config})
    async with await Host.open(home, pool=0, registries=settings) as host:
        sys.settrace(trace)
        threading.settrace(trace)
        await host.registries.pull(authority + "/team/image:1", RegistryAccess(private=True))
        sys.settrace(None)
        print(lines, flush=True)

asyncio.run(main())
"""


def content_of(number: int) -> bytes:
    """Return the content of the files of a layer."""
    return random.Random(number).randbytes(50_000)


def layer(number: int) -> bytes:
    """Return a layer with a directory, a link and some files."""
    files: dict[str, bytes | str | None] = {f"d{number}": None, f"d{number}/l": "../x"}
    return tar(files | {f"d{number}/{name}": content_of(number) for name in range(10)})


IMAGE = TestImage(layers=[layer(number) for number in range(5)])


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A registry that has the image."""
    with run_registry(tmp_path_factory.mktemp("registry")) as server:
        IMAGE.push(server.url, "team/image", "1")
        yield server


def pull_in_process(home: str, authority: str, kill_at: int) -> str:
    """Pull the image in another process, and return how many lines that took."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, home, authority, str(kill_at)],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode in (0, -9), done.stderr
    return done.stdout


def complete_layers(home: str) -> dict[str, int]:
    """Return the inodes of the layers that are complete."""
    layers = Path(home, "images/layers")
    return {
        one.name: one.stat().st_ino for one in layers.glob("sha256-*") if (one / "files").is_dir()
    }


async def test_pull_is_whole_or_not_at_all_after_kill(
    registry: RegistryServer, tmp_path: Path
) -> None:
    seed = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.randrange(1 << 30)))
    sys.stdout.write(f"SMOKEBOX_CRASH_SEED={seed}\n")
    rng = random.Random(seed)
    lines = int(pull_in_process(f"{tmp_path}/whole", registry.authority, 0))
    assert lines > 500
    for number in range(TRIES):
        home = f"{tmp_path}/{number}"
        # At least one in each part of the pull.
        start = lines * number // TRIES
        pull_in_process(home, registry.authority, rng.randrange(start, start + lines // TRIES) + 1)
        await check(home, registry)


async def check(home: str, registry: RegistryServer) -> None:
    """Start an engine after a kill, and pull the image."""
    stored = complete_layers(home)
    plain = RegistrySettings(registries={registry.authority: RegistryConfig(plain_http=True)})
    async with await Host.open(home, pool=0, registries=plain) as host:
        layers = Path(home, "images/layers")
        assert not [*layers.glob(".making-*"), *layers.glob(".removed-*")]
        assert complete_layers(home) == stored
        name = f"{registry.authority}/team/image:1"
        known = await host.registries.find(name, None)
        assert known is None or len(stored) == len(IMAGE.layers)
        image = (await host.registries.pull(name, RegistryAccess(private=True))).image
        assert known is None or known.digest == image.digest
        after = complete_layers(home)
        assert len(after) == len(IMAGE.layers)
        assert {one: after[one] for one in stored} == stored
        for number, one in enumerate(reversed(image.layers)):
            directory = Path(layers, one.id.replace(":", "-"), "files", f"d{number}")
            files = {
                file.name: file.read_bytes() for file in directory.iterdir() if file.name != "l"
            }
            assert files == {str(n): content_of(number) for n in range(10)}
            assert os.readlink(directory / "l") == "../x"
