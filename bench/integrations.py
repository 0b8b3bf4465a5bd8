"""Overhead of the adapters, compared with the local backend of each framework.

    python bench/integrations.py [--rounds 5] [--repeats 30]

Ours is the adapter over `local()`, theirs the backend of the framework, alternating in the same
directory. Each figure is the best median of the rounds; below a ratio of 1 we are faster.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass

from deepagents.backends import LocalShellBackend
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment
from pydantic_ai.workspaces import LocalWorkspaceBackend

from smokebox import SandboxApi, local
from smokebox.integrations.deepagents import SmokeboxBackend
from smokebox.integrations.inspect import SmokeboxEnvironment
from smokebox.integrations.pydantic_ai import SmokeboxWorkspace
from table import Work, median

LINES = "".join(f"line {n} of the file, with the word needle\n" for n in range(1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An operation of both backends."""

    name: str
    ours: Work
    theirs: Work


def pydantic_ai_pairs(sandbox: SandboxApi, folder: str) -> list[Pair]:
    ours, theirs = SmokeboxWorkspace(sandbox), LocalWorkspaceBackend(folder)
    file = f"{folder}/file"
    data = LINES.encode()
    return [
        Pair(
            name="pydantic-ai run",
            ours=lambda: ours.run(["echo", "hi"]),
            theirs=lambda: theirs.run(["echo", "hi"]),
        ),
        Pair(
            name="pydantic-ai write",
            ours=lambda: ours.write_bytes(file, data),
            theirs=lambda: theirs.write_bytes(file, data),
        ),
        Pair(
            name="pydantic-ai read",
            ours=lambda: ours.read_bytes(file),
            theirs=lambda: theirs.read_bytes(file),
        ),
    ]


def inspect_pairs(sandbox: SandboxApi, folder: str) -> list[Pair]:
    ours, theirs = SmokeboxEnvironment(sandbox), LocalSandboxEnvironment()
    file = f"{folder}/file"
    return [
        Pair(
            name="inspect exec",
            ours=lambda: ours.exec(["echo", "hi"]),
            theirs=lambda: theirs.exec(["echo", "hi"]),
        ),
        Pair(
            name="inspect write_file",
            ours=lambda: ours.write_file(file, LINES),
            theirs=lambda: theirs.write_file(file, LINES),
        ),
        Pair(
            name="inspect read_file",
            ours=lambda: ours.read_file(file),
            theirs=lambda: theirs.read_file(file),
        ),
    ]


def deepagents_pairs(backend: SmokeboxBackend, folder: str) -> list[Pair]:
    theirs = LocalShellBackend(root_dir=folder, virtual_mode=False, inherit_env=True)
    file = f"{folder}/file"
    return [
        Pair(
            name="deepagents aexecute",
            ours=lambda: backend.aexecute("echo hi"),
            theirs=lambda: theirs.aexecute("echo hi"),
        ),
        Pair(
            name="deepagents awrite",
            ours=lambda: backend.awrite(file, LINES),
            theirs=lambda: theirs.awrite(file, LINES),
        ),
        Pair(
            name="deepagents aread",
            ours=lambda: backend.aread(file),
            theirs=lambda: theirs.aread(file),
        ),
        Pair(
            name="deepagents agrep",
            ours=lambda: backend.agrep("line 500", folder),
            theirs=lambda: theirs.agrep("line 500", folder),
        ),
        Pair(
            name="deepagents aglob",
            ours=lambda: backend.aglob("*.txt", folder),
            theirs=lambda: theirs.aglob("*.txt", folder),
        ),
    ]


async def measure(pair: Pair, rounds: int, repeats: int) -> None:
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(await median(pair.ours, repeats))
        theirs.append(await median(pair.theirs, repeats))
    best, other = min(ours), min(theirs)
    print(f"{pair.name:22}{best * 1e3:10.2f} ms{other * 1e3:10.2f} ms{best / other:8.2f}")


async def main(rounds: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        sandbox = local(cwd=folder)
        print(f"{'':22}{'ours':>13}{'theirs':>13}{'ratio':>8}")
        for pair in [*pydantic_ai_pairs(sandbox, folder), *inspect_pairs(sandbox, folder)]:
            await measure(pair, rounds, repeats)
        await sandbox.aclose()
        with SmokeboxBackend(local(cwd=other)) as backend:
            for pair in deepagents_pairs(backend, other):
                await measure(pair, rounds, repeats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.repeats))
