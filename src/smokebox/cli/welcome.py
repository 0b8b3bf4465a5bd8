"""What a server that has just started shows of itself, and what to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from typing import TYPE_CHECKING

import typer

from smokebox.cli.agents.demonstration import PROMPT, demonstrate
from smokebox.cli.failure import report
from smokebox.client.client import connect
from smokebox.errors import SmokeboxError
from smokebox.wire.place import default_home

if TYPE_CHECKING:
    from smokebox.server.serving import Running

_PROGRAM = ["python3", "-c", "print(6 * 7)"]

_NEXT = """
Try from another shell:
{home}
  {smokebox} create mine
  {smokebox} exec mine -- 'echo hello > note.txt; uname -sr'
  {smokebox} sh mine
{curl}
or from Python ({python} -m asyncio):

  from smokebox import get_sandbox
  sandbox = get_sandbox("mine")
  result = await sandbox.exec("cat note.txt")
  print(result.stdout)
  await sandbox.destroy()

or an agent, with a key of yours:

  export ANTHROPIC_API_KEY=...
  {smokebox} chat --model anthropic/claude-sonnet-4-6 --sandbox mine

Ctrl-C stops this server. Sandboxes run on: the next one has them again.
"""

_HOME = """
  export SMOKEBOX_HOME={home}"""

_CURL = """  curl -s {url}/api/sandboxes/mine/exec -d '{{"command": "cat note.txt"}}' \\
    -H 'content-type: application/json'{key}
"""

_KEY = """ \\
    -H "authorization: Bearer $({smokebox} keys create --name curl)\""""


async def welcome(server: Running) -> None:
    """Run a program in a sandbox of that server, and say what a person can do there."""
    await _prove(server.socket)
    smokebox, settings = _command("smokebox"), server.state.settings
    key = _KEY.format(smokebox=smokebox) if settings.needs_keys else ""
    home = "" if settings.home == default_home() else _HOME.format(home=shlex.quote(settings.home))
    curl = "" if server.url is None else _CURL.format(url=server.url, key=key)
    typer.echo(_NEXT.format(smokebox=smokebox, curl=curl, home=home, python=_command("python")))


async def _prove(socket: str) -> None:
    began = time.monotonic()
    try:
        async with connect(f"unix:{socket}") as client, await client.create() as sandbox:
            said = (await sandbox.exec(_PROGRAM, timeout=10)).stdout.strip()
            took = (time.monotonic() - began) * 1000
            program = shlex.join(_PROGRAM)
            typer.echo(f"It works: {program} in a new sandbox said {said}, in {took:.0f} ms.")
            typer.echo(f"\nAn agent works in it (its model is a script: no key needed): {PROMPT}")
            typer.echo((await demonstrate(sandbox)).rstrip())
    except SmokeboxError as error:
        report(error)
        typer.echo(f"{_command('smokebox')} doctor says what this machine lacks.", err=True)


def _command(name: str) -> str:
    """How a person calls what is installed beside this Python."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    found = shutil.which(name)
    if not os.path.exists(beside) or (found and os.path.samefile(found, beside)):
        return name
    near = os.path.relpath(beside)
    return shlex.quote(beside if near.startswith("..") else near)
