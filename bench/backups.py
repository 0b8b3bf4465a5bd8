"""Making and restoring backups, beside the tools that one would use by hand, in the same run.

    python bench/backups.py [--rounds 5]

Two trees: many small files, and few large ones. The peers work on a plain directory of this
host, on the same disk; ours work on the same files in a running sandbox, from outside and by the
SDK's server's engine, with checksum, manifest and fsync. `tar | zstd` has the same level and
threads, and is asked to fsync as well. A ratio is our time divided by theirs: below 1 we are
faster. Sizes are of what is kept.
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
class Peer:
    """A tool: how it packs a tree, and how it unpacks that into an empty directory."""

    name: str
    needs: str
    pack: str
    unpack: str


# {tree} is what to pack, {kept} where that goes, {out} an empty directory.
PEERS = (
    Peer(
        "tar | zstd -3 -T2",
        "zstd",
        "tar -C {tree} -cf - . | zstd -3 -T2 -q -f -o {kept} && sync {kept}",
        "zstd -dc {kept} | tar -C {out} -xf -",
    ),
    Peer(
        "mksquashfs zstd 3",
        "mksquashfs",
        "rm -f {kept}; mksquashfs {tree} {kept} -comp zstd -Xcompression-level 3 -quiet "
        "-no-progress >/dev/null && sync {kept}",
        "unsquashfs -quiet -no-progress -f -d {out} {kept} >/dev/null",
    ),
    Peer(
        "restic",
        "restic",
        "rm -rf {kept}; restic -q -r {kept} init >/dev/null && "
        "cd {tree} && restic -q -r {kept} backup . >/dev/null",
        "restic -q -r {kept} restore latest --target {out} >/dev/null",
    ),
)


def fill(folder: Path, files: int, size: int) -> None:
    """Make files of text that compresses about as source code does, and some that do not."""
    chance = random.Random(7)
    for number in range(files):
        path = folder / f"d{number % 97}" / f"e{number % 7}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 4 == 3:
            path.write_bytes(chance.randbytes(size))
        else:
            text = "".join(chance.choices(WORDS, k=min(size, 1 << 16) // 8))
            path.write_bytes((text * (size // len(text) + 1))[:size].encode())


def shell(command: str, base: Path) -> Callable[[], None]:
    words = {"tree": base / "tree", "kept": base / "kept", "out": base / "out"}
    env = {**os.environ, "RESTIC_PASSWORD": "x", "RESTIC_CACHE_DIR": str(base / "cache")}

    def run() -> None:
        subprocess.run(["bash", "-c", command.format(**words)], check=True, env=env)

    return run


async def packed(tree: Path) -> AsyncIterator[bytes]:
    """A tree as one tar archive."""
    words = ["tar", "-C", str(tree), "-cf", "-", "."]
    yield subprocess.run(words, check=True, capture_output=True).stdout


def size_of(path: Path) -> int:
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    return path.stat().st_size


class Ours:
    """The same tree in a sandbox."""

    def __init__(self, host: Host, sandbox: Sandbox) -> None:
        self._host = host
        self._sandbox = sandbox
        self.kept: list[str] = []
        self.size = 0

    async def create(self) -> None:
        """Make a backup."""
        backup = await self._sandbox.backups.create()
        self.kept.append(backup.id)
        self.size = backup.size

    async def restore(self) -> None:
        """Restore the last one, over what is there."""
        await self._sandbox.backups.restore(self.kept[-1])

    async def forget(self) -> None:
        """Remove all but the last one."""
        for id in self.kept[:-1]:
            await self._host.backups.delete(id)
        del self.kept[:-1]


async def measure(table: Table, base: Path, peer: Peer, ours: Ours, rounds: int) -> None:
    out = base / "out"
    pack, unpack = shell(peer.pack, base), shell(peer.unpack, base)

    async def their_pack() -> None:
        await asyncio.to_thread(pack)

    async def their_unpack() -> None:
        await asyncio.to_thread(unpack)

    async def empty() -> None:
        await asyncio.to_thread(shutil.rmtree, out, ignore_errors=True)
        out.mkdir()

    ours_made, theirs_made = await in_turns(ours.create, their_pack, repeats=rounds)
    await ours.forget()
    # In turns with emptying, which is not counted.
    ours_back, theirs_back, _ = await in_turns(ours.restore, their_unpack, empty, repeats=rounds)
    table.line(f"  create, beside {peer.name}", ours_made, to=peer.name, other=theirs_made)
    table.line(f"  restore, beside {peer.name}", ours_back, to=peer.name, other=theirs_back)
    kept = size_of(base / "kept")
    table.text(f"  size: {ours.size >> 10} KiB, theirs {kept >> 10} KiB ({ours.size / kept:.2f})")


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
                await sandbox.files.upload_tar("/workspace", packed(base / "tree"))
                ours = Ours(host, sandbox)
                for peer in PEERS:
                    if shutil.which(peer.needs) is None:
                        table.text(f"  {peer.name}: not installed")
                        continue
                    await measure(table, base, peer, ours, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(main(parser.parse_args().rounds))
