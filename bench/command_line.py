"""Time of commands of the command line that send one request to a server.

    python bench/command_line.py [--repeats 20]

Each is a separate process, measured from start to end, alternating with a Python that does
nothing and with one that imports an HTTP library. Bytecode is cached, as after an installation.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

from table import Table, Work, in_turns

SMOKEBOX = str(Path(sys.executable).with_name("smokebox"))
COMMANDS = {
    "ls": ["ls"],
    "info": ["info", "box"],
    "ps": ["ps", "box"],
    "exec": ["exec", "box", "/bin/true"],
    "sh -c": ["sh", "box", "-c", "true"],
    "logs": ["logs", "box", "PROCESS"],
    "cp into it": ["cp", __file__, "box:/tmp/file"],
    "cp out of it": ["cp", "box:/etc/hostname", "COPY"],
}


async def process(*command: str) -> None:
    """Run a command to its end."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


async def first_prompt() -> None:
    """Open a shell in a terminal, and wait for its first output."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(SMOKEBOX, [SMOKEBOX, "sh", "box"])
    os.read(fd, 1)
    os.close(fd)
    os.waitpid(pid, 0)


async def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SMOKEBOX_HOME"] = folder
        await process(SMOKEBOX, "up")
        try:
            await process(SMOKEBOX, "create", "box")
            started = subprocess.check_output([SMOKEBOX, "start", "box", "true"], text=True)
            await compare(started.strip(), os.path.join(folder, "copy"), options.repeats)
        finally:
            await process(SMOKEBOX, "down")


async def compare(process_id: str, copy: str, repeats: int) -> None:
    """Measure every command."""
    table = Table()
    python = functools.partial(process, sys.executable, "-c", "pass")
    library = functools.partial(process, sys.executable, "-c", "import aiohttp")
    values = {"PROCESS": process_id, "COPY": copy}
    commands: dict[str, Work] = {
        name: functools.partial(process, SMOKEBOX, *[values.get(word, word) for word in words])
        for name, words in COMMANDS.items()
    }
    commands["sh, to its prompt"] = first_prompt
    # Once before, to fill the page cache.
    await in_turns(*commands.values(), library, repeats=1)
    nothing, imported, *times = await in_turns(python, library, *commands.values(), repeats=repeats)
    table.line("import aiohttp", imported, to="python -c pass", other=nothing)
    for name, measured in zip(commands, times, strict=True):
        table.line(name, measured, to="python -c pass", other=nothing)


if __name__ == "__main__":
    asyncio.run(main())
