"""Pull and unpack an image of a local registry, compared with skopeo and umoci.

    python bench/images.py [--rounds 5] [--base DIRECTORY]

The image is a tree of this host in several layers: by default parts of /usr, about 200 MB. Debian's
`docker-registry` serves it on a loopback port. skopeo copies it into an OCI layout, and umoci
unpacks that into a directory; ours is one `pull` into an empty store. The goal is a ratio of at
most 0.5. A second line has the pull of an image that is known.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine import Host
from smokebox.engine.images.registry.access import (
    RegistryAccess,
    RegistryConfig,
    RegistrySettings,
)
from table import Table, in_turns

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from oci_images import TestImage
from registry_server import run_registry

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = ("lib/python3*", "share/perl*", "lib/git-core", "include", "share/zoneinfo", "lib/gcc")
LARGEST = 60 << 20
GOAL = 0.5


def layers(base: Path) -> Iterator[bytes]:
    """Yield archives of parts of a tree, each of limited size."""
    for pattern in PARTS:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for file in sorted(itertools.chain(*(path.rglob("*") for path in base.glob(pattern)))):
                if buffer.tell() > LARGEST:
                    break
                with contextlib.suppress(OSError):
                    archive.add(file, f"usr/{file.relative_to(base)}", recursive=False)
        if buffer.tell() > 1 << 20:
            yield buffer.getvalue()


def count_members(archive: bytes) -> int:
    """Return how many files, directories and links an archive has."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return len(opened.getnames())


async def run(rounds: int, base: Path, folder: Path) -> float:
    """Measure, print, and return the ratio of a cold pull."""
    image = TestImage(layers=list(layers(base)))
    with run_registry(folder / "registry") as registry:
        image.push(registry.url, "bench/image", "1")
        name = f"{registry.authority}/bench/image:1"
        settings = RegistrySettings(
            registries={registry.authority: RegistryConfig(plain_http=True)}
        )
        access = RegistryAccess(private=("127.0.0.0/8",))
        numbers = itertools.count()
        warm = await Host.open(folder / "warm", pool=0, registries=settings)

        async def ours() -> None:
            home = folder / f"home-{next(numbers)}"
            async with await Host.open(home, pool=0, registries=settings) as host:
                await host.registries.pull(name, access)

        async def theirs() -> None:
            layout = folder / f"layout-{next(numbers)}"
            copy = f"skopeo copy -q --src-tls-verify=false docker://{name} oci:{layout}:it"
            await shell(f"{copy} && umoci raw unpack --image {layout}:it {layout}-tree")

        async def again() -> None:
            await warm.registries.pull(name, access)

        async with warm:
            await again()
            table = Table()
            size = sum(map(len, image.layers)) >> 20
            members = sum(map(count_members, image.layers))
            table.text(f"{len(image.layers)} layers, {size} MiB, {members} members")
            cold, other, known = await in_turns(ours, theirs, again, repeats=rounds)
        table.line("pull and unpack", cold, to="skopeo copy + umoci unpack", other=other)
        table.line("pull again", known, to="skopeo copy + umoci unpack", other=other)
        return sorted(cold)[len(cold) // 2] / sorted(other)[len(other) // 2]


async def shell(command: str) -> None:
    """Run a command that must succeed."""
    process = await asyncio.create_subprocess_shell(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        sys.exit(errors.decode())


def main() -> int:
    """Run the benchmark; exits with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path, default=Path("/usr"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-images-"))
    versions = subprocess.run(["umoci", "--version"], capture_output=True, text=True, check=True)
    sys.stdout.write(f"{json.dumps(os.uname().release)} {versions.stdout.strip()}\n")
    try:
        return int(asyncio.run(run(options.rounds, options.base, folder)) > GOAL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
