"""Backups, compared with tools that one would use by hand.

    python bench/backups.py [--rounds 5]

There are two trees: many small files, and few large ones. The other tools work on a directory of
this host on the same disk; ours works on the same files in a running sandbox, with checksum,
manifest and fsync. `tar | zstd` has the same level and threads, and an fsync as well. A ratio is
our time divided by theirs: below 1 we are faster. Sizes are those of the archives.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine import Host, Sandbox
from table import Table, in_turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SMALL_FILES, SMALL_BYTES = 5_000, 4_000
LARGE_FILES, LARGE_BYTES = 4, 64 << 20
WORDS = [f"word{number} " for number in range(2000)]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, with its commands to pack a tree and to unpack it into an empty directory."""

    name: str
    needs: str
    pack: str
    unpack: str


# {tree} is the source, {archive} the result, {out} an empty directory.
TOOLS = (
    Tool(
        "tar | zstd -3 -T2",
        "zstd",
        "tar -C {tree} -cf - . | zstd -3 -T2 -q -f -o {archive} && sync {archive}",
        "zstd -dc {archive} | tar -C {out} -xf -",
    ),
    Tool(
        "mksquashfs zstd 3",
        "mksquashfs",
        "rm -f {archive}; mksquashfs {tree} {archive} -comp zstd -Xcompression-level 3 -quiet "
        "-no-progress >/dev/null && sync {archive}",
        "unsquashfs -quiet -no-progress -f -d {out} {archive} >/dev/null",
    ),
    Tool(
        "restic",
        "restic",
        "rm -rf {archive}; restic -q -r {archive} init >/dev/null && "
        "cd {tree} && restic -q -r {archive} backup . >/dev/null",
        "restic -q -r {archive} restore latest --target {out} >/dev/null",
    ),
)


def fill(folder: Path, files: int, size: int) -> None:
    """Create files that compress about as well as source code, and some that do not compress."""
    rng = random.Random(7)
    for number in range(files):
        path = folder / f"d{number % 97}" / f"e{number % 7}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 4 == 3:
            path.write_bytes(rng.randbytes(size))
        else:
            text = "".join(rng.choices(WORDS, k=min(size, 1 << 16) // 8))
            path.write_bytes((text * (size // len(text) + 1))[:size].encode())


def shell(command: str, base: Path) -> Callable[[], None]:
    words = {"tree": base / "tree", "archive": base / "archive", "out": base / "out"}
    env = {**os.environ, "RESTIC_PASSWORD": "x", "RESTIC_CACHE_DIR": str(base / "cache")}

    def run() -> None:
        subprocess.run(["bash", "-c", command.format(**words)], check=True, env=env)

    return run


async def tar_stream(tree: Path) -> AsyncIterator[bytes]:
    """Yield a tree as one tar archive."""
    words = ["tar", "-C", str(tree), "-cf", "-", "."]
    yield subprocess.run(words, check=True, capture_output=True).stdout


def size_of(path: Path) -> int:
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    return path.stat().st_size


class Ours:
    """Backups of the same tree in a sandbox."""

    def __init__(self, host: Host, sandbox: Sandbox) -> None:
        self._host = host
        self._sandbox = sandbox
        self.ids: list[str] = []
        self.size = 0

    async def create(self) -> None:
        """Create a backup."""
        backup = await self._sandbox.backups.create()
        self.ids.append(backup.id)
        self.size = backup.size

    async def restore(self) -> None:
        """Restore the last backup over the existing files."""
        await self._sandbox.backups.restore(self.ids[-1])

    async def delete_old(self) -> None:
        """Delete all but the last backup."""
        for id in self.ids[:-1]:
            await self._host.backups.delete(id)
        del self.ids[:-1]


async def measure(table: Table, base: Path, tool: Tool, ours: Ours, rounds: int) -> None:
    out = base / "out"
    pack, unpack = shell(tool.pack, base), shell(tool.unpack, base)

    async def their_pack() -> None:
        await asyncio.to_thread(pack)

    async def their_unpack() -> None:
        await asyncio.to_thread(unpack)

    async def empty() -> None:
        await asyncio.to_thread(shutil.rmtree, out, ignore_errors=True)
        out.mkdir()

    our_packs, their_packs = await in_turns(ours.create, their_pack, repeats=rounds)
    await ours.delete_old()
    # Emptying the directory is not counted.
    our_unpacks, their_unpacks, _ = await in_turns(
        ours.restore, their_unpack, empty, repeats=rounds
    )
    table.line(f"  create, beside {tool.name}", our_packs, to=tool.name, other=their_packs)
    table.line(f"  restore, beside {tool.name}", our_unpacks, to=tool.name, other=their_unpacks)
    size = size_of(base / "archive")
    table.text(f"  size: {ours.size >> 10} KiB, theirs {size >> 10} KiB ({ours.size / size:.2f})")


async def main(rounds: int) -> None:
    table = Table()
    for name, files, size in (
        (f"{SMALL_FILES} files of {SMALL_BYTES} bytes", SMALL_FILES, SMALL_BYTES),
        (f"{LARGE_FILES} files of {LARGE_BYTES >> 20} MiB", LARGE_FILES, LARGE_BYTES),
    ):
        table.text(name)
        with tempfile.TemporaryDirectory(prefix="smokebox-bench-") as folder:
            base = Path(folder)
            (base / "out").mkdir()
            fill(base / "tree", files, size)
            async with await Host.open(base / "home", pool=0) as host:
                sandbox = await host.create("bench", limits={"disk": None})
                await sandbox.files.upload_tar("/workspace", tar_stream(base / "tree"))
                ours = Ours(host, sandbox)
                for tool in TOOLS:
                    if shutil.which(tool.needs) is None:
                        table.text(f"  {tool.name}: not installed")
                        continue
                    await measure(table, base, tool, ours, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(main(parser.parse_args().rounds))
