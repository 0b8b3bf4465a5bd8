"""What a server that has just started shows of itself, and what to try next."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import time

import typer

from smokebox.cli.failure import report
from smokebox.client.connection import Address
from smokebox.client.sandbox import Sandbox
from smokebox.client.transport import Transport
from smokebox.errors import SmokeboxError
from smokebox.wire.requests import Settings

_PROGRAM = ["python3", "-c", "print(6 * 7)"]

_NEXT = """
Try from another shell:

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

Ctrl-C stops this server: sandboxes sleep, and keep their files.
"""

_CURL = """  curl -s {url}/api/sandboxes/mine/exec -d '{{"command": "cat note.txt"}}' \\
    -H 'content-type: application/json'
"""


async def welcome(socket: str, url: str | None) -> None:
    """Run a program in a sandbox of that server, and say what a person can do there."""
    await _prove(socket)
    smokebox = _command("smokebox")
    curl = "" if url is None else _CURL.format(url=url)
    typer.echo(_NEXT.format(smokebox=smokebox, curl=curl, python=_command("python")))


async def _prove(socket: str) -> None:
    transport = Transport(Address.parse(f"unix:{socket}"))
    id = f"welcome-{secrets.token_hex(4)}"
    sandbox = Sandbox(id, transport, Settings(ephemeral=True))
    began = time.monotonic()
    try:
        said = (await sandbox.exec(_PROGRAM, timeout=10)).stdout.strip()
        took = (time.monotonic() - began) * 1000
        typer.echo(
            f"It works: {shlex.join(_PROGRAM)} in a new sandbox said {said}, in {took:.0f} ms."
        )
        await transport.ask(type(None), "DELETE", f"/sandboxes/{id}")
    except SmokeboxError as error:
        report(error)
        typer.echo(f"{_command('smokebox')} doctor says what this machine lacks.", err=True)
    finally:
        await transport.connections.aclose()


def _command(name: str) -> str:
    """How a person calls what is installed beside this Python."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    found = shutil.which(name)
    if not os.path.exists(beside) or (found and os.path.samefile(found, beside)):
        return name
    near = os.path.relpath(beside)
    return shlex.quote(beside if near.startswith("..") else near)
