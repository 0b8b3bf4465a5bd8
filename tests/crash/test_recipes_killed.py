"""SIGKILL of a server that builds a recipe: nothing half-made, and nothing left.

The next server goes on: steps that were finished are not run again.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.leftovers import find_leftovers
from killable_server import new_home
from smokebox import connect
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.errors import SandboxGone, ServiceUnavailable
from smokebox.foundation.endpoint import socket_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.wire.builds import BuildEvent

SOURCE = Path(__file__).parents[2] / "src"
TRIES = int(os.environ.get("SMOKEBOX_CRASH_TRIES", "6"))
pytestmark = pytest.mark.timeout(60 + 15 * TRIES)

SERVER_GONE = (SandboxGone, ServiceUnavailable)
OFFLINE = RegistrySettings(default="127.0.0.1:1")
FIRST = "FROM host\nRUN date +%N > /first\n"
SECOND = "RUN date +%N > /second && echo second\n"
PYTHON = "FROM recipe:base\nRUN cat /first /second > /both\n"

SERVER = """
import asyncio, pathlib, sys
from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

async def main():
    offline = RegistrySettings(default="127.0.0.1:1")
    settings = ServerSettings(home=sys.argv[1], pool=0, registries=offline)
    async with run_server(settings) as server:
        server.state.host.recipes.folder = pathlib.Path(sys.argv[2])
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""

# With `kill_at`, the process kills itself at that executed line of the traced files; otherwise it
# prints how many there were.
ENGINE = """
import asyncio, os, pathlib, sys, threading
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import RegistrySettings

home, folder, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
TRACED = ("images/recipe_images.py", "images/catalog.py")
PARTS = ("images/build/", "images/layer_")
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
    offline = RegistrySettings(default="127.0.0.1:1")
    async with await Host.open(home, pool=0, registries=offline) as host:
        host.recipes.folder = pathlib.Path(folder)
        sys.settrace(trace)
        threading.settrace(trace)
        async for _ in host.recipes.stream("recipe:python"):
            pass
        sys.settrace(None)
        print(lines, flush=True)

asyncio.run(main())
"""


def write_recipes(folder: Path, *, second: str = SECOND) -> Path:
    """Write recipes that need no network."""
    (folder / "host").mkdir(parents=True, exist_ok=True)
    (folder / "host" / "base.Dockerfile").write_text(FIRST + second)
    (folder / "host" / "python.Dockerfile").write_text(PYTHON)
    (folder / "host" / "install.sh").write_text("")
    return folder


def environment() -> dict[str, str]:
    """Return the environment of a process that builds: its package index does not respond."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(SOURCE),
        "PIP_INDEX_URL": "http://127.0.0.1:1/simple",
    }


@contextlib.contextmanager
def run_server(home: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a server with these recipes, and kill it at the end."""
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER, home, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env=environment(),
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        yield server
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


async def test_a_recipe_is_built_further_by_the_next_server(tmp_path: Path) -> None:
    slow = write_recipes(tmp_path / "slow", second="RUN echo started; sleep 60 & sleep 60\n")
    with new_home() as home:
        async with connect(f"unix:{socket_path(home)}") as client:
            with run_server(home, slow) as server, pytest.raises(SERVER_GONE):
                async for event in client.builds.stream("recipe:python"):
                    if event.data == "started\n":
                        server.kill()
            with run_server(home, write_recipes(tmp_path / "recipes")):
                assert await client.images.list() == []
                assert find_leftovers(home) == []
                events = [one async for one in client.builds.stream("recipe:python")]
                assert "RUN date +%N > /first" in cached(events)
                async with await client.create(image="recipe:python") as sandbox:
                    assert (await sandbox.exec("cat /first /second | cmp - /both")).success
        async with await Host.open(home, pool=0, registries=OFFLINE) as host:
            await check_layers(host)


def cached(events: list[BuildEvent]) -> list[str]:
    return [one.instruction for one in events if one.kind == "done" and one.cached]


async def test_a_recipe_is_whole_or_not_there_after_kill(tmp_path: Path) -> None:
    seed = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.randrange(1 << 30)))
    sys.stdout.write(f"SMOKEBOX_CRASH_SEED={seed}\n")
    rng = random.Random(seed)
    folder = write_recipes(tmp_path / "recipes")
    lines = int(build_in_process(tmp_path / "whole", folder, 0))
    assert lines > 500
    for number in range(TRIES):
        # At least one in each part of the build.
        start = lines * number // TRIES
        kill_at = rng.randrange(start, start + lines // TRIES) + 1
        build_in_process(tmp_path / str(number), folder, kill_at)
        await check(tmp_path / str(number), folder)


def build_in_process(home: Path, folder: Path, kill_at: int) -> str:
    """Build the recipes in another process, and return how many lines that took."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ENGINE, str(home), str(folder), str(kill_at)],
        capture_output=True,
        text=True,
        cwd="/",
        env=environment(),
    )
    assert done.returncode in (0, -9), done.stderr
    return done.stdout


async def check(home: Path, folder: Path) -> None:
    """Start an engine after a kill: what is there is whole, and what is missing is built."""
    async with await Host.open(home, pool=0, registries=OFFLINE) as host:
        host.recipes.folder = folder
        assert find_leftovers(str(home)) == []
        await check_layers(host)
        for image in await host.images.list():
            for name in image.names:
                box = await host.create(image=name)
                files = "/both" if name == "recipe:python" else "/first /second"
                assert (await box.exec(f"test -s {files.replace(' ', ' && test -s ')}")).success
                await box.destroy()
        box = await host.create(image="recipe:python")
        assert (await box.exec("cat /first /second | cmp - /both")).success
        await box.destroy()
        await check_layers(host)


async def check_layers(host: Host) -> None:
    """Check that each layer on disk that a step wrote belongs to an image or a cached step."""
    folder = Path(host.home, "images/layers")
    # The first kill may come before the first layer.
    folder.mkdir(parents=True, exist_ok=True)
    uppers = {one.name for one in folder.iterdir() if one.name.startswith("upper")}
    used = {id.replace(":", "-") for id in await host.images.catalog._used_layers()}
    assert uppers <= used
    assert not [*folder.glob(".making-*"), *folder.glob(".removed-*")]
