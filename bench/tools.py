"""Overhead of each tool of an agent over the sandbox calls that it makes.

    python bench/tools.py [--rounds 5] [--repeats 40]

Each tool alternates with the bare calls that it makes, in the same sandbox. The ratio is that
of the medians of the best rounds. Sandboxes are not compared with each other.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass

from smokebox import SandboxApi, local, virtual
from smokebox.agents.tools import Tool, workspace_tools
from table import Work, median

LINES = "".join(f"line {n} of the file, with the word needle\n" for n in range(1000))
SEARCH = 'grep -rnHI --null -e "$PATTERN" -- "$FOLDER"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A tool call, and the sandbox calls that it makes."""

    name: str
    tool: Work
    bare: Work


async def prepare(sandbox: SandboxApi) -> None:
    """Write the files that the calls use."""
    await sandbox.write_file("file.txt", LINES)
    for number in range(50):
        await sandbox.write_file(f"tree/{number % 5}/{number}.txt", "hay\nneedle\n")


def pairs(sandbox: SandboxApi, tools: dict[str, Tool]) -> list[Pair]:
    """Return every tool with the calls that it makes."""
    folder = sandbox.resolve_path("tree")
    search = {"PATTERN": "needle", "FOLDER": folder}

    def call(name: str, **arguments: object) -> Work:
        return lambda: tools[name].run(arguments)

    # The file is changed and changed back, so that every round starts with the same.
    async def change_by_tool() -> None:
        for old, new in (("line 500", "LINE 500"), ("LINE 500", "line 500")):
            await tools["edit"].run({"path": "file.txt", "old_text": old, "new_text": new})

    async def change_bare() -> None:
        for old, new in ((b"line 500", b"LINE 500"), (b"LINE 500", b"line 500")):
            data = await sandbox.read_bytes("file.txt")
            await sandbox.write_file("file.txt", data.replace(old, new))

    return [
        Pair(
            name="read",
            tool=call("read", path="file.txt"),
            bare=lambda: sandbox.read_file("file.txt"),
        ),
        Pair(
            name="write",
            tool=call("write", path="copy.txt", content=LINES),
            bare=lambda: sandbox.write_file("copy.txt", LINES),
        ),
        Pair(name="edit", tool=change_by_tool, bare=change_bare),
        Pair(
            name="bash", tool=call("bash", command="echo hi"), bare=lambda: sandbox.exec("echo hi")
        ),
        Pair(
            name="bash, 1,000 lines",
            tool=call("bash", command="cat file.txt"),
            bare=lambda: sandbox.exec("cat file.txt"),
        ),
        Pair(
            name="grep",
            tool=call("grep", pattern="needle", path="tree"),
            bare=lambda: sandbox.exec(SEARCH, env=search),
        ),
        Pair(
            name="glob",
            tool=call("glob", pattern="**/*.txt", path="tree"),
            bare=lambda: sandbox.glob("**/*.txt", cwd="tree", files_only=True),
        ),
    ]


async def compare(name: str, sandbox: SandboxApi, rounds: int, repeats: int) -> None:
    """Print the ratio for each tool over one sandbox."""
    await prepare(sandbox)
    tools = {tool.name: tool for tool in workspace_tools(sandbox)}
    for pair in pairs(sandbox, tools):
        await pair.tool()
        by_tool, bare = [], []
        for _ in range(rounds):
            by_tool.append(await median(pair.tool, repeats))
            bare.append(await median(pair.bare, repeats))
        sys.stdout.write(f"{name:8} {pair.name:18} {min(by_tool) / min(bare):6.2f}\n")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    sys.stdout.write(f"{'sandbox':8} {'tool':18} {'ratio':>6}\n")
    with tempfile.TemporaryDirectory() as folder:
        async with local(cwd=folder) as sandbox:
            await compare("local", sandbox, options.rounds, options.repeats)
    async with virtual() as sandbox:
        await compare("virtual", sandbox, options.rounds, options.repeats)


if __name__ == "__main__":
    asyncio.run(main())
