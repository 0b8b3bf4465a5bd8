"""Server in the foreground: runs until a signal, with a demonstration in a terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
import uvloop

from smokebox import __version__
from smokebox.agents.agent import create_agent
from smokebox.agents.harness import init
from smokebox.cli.agents.views import TextView
from smokebox.cli.output import report
from smokebox.client.bindings import bucket_binding
from smokebox.client.client import connect
from smokebox.errors import Conflict, InvalidOption, SmokeboxError
from smokebox.foundation.endpoint import default_home
from smokebox.foundation.tasks import run_until_first
from smokebox.project import load_config
from smokebox.sandbox.access import with_environment
from smokebox.server import request_log
from smokebox.server.server import RunningServer, serve
from smokebox.server.settings import OfferedBucket
from smokebox.testing import ScriptedModel, call
from smokebox.testing.scripted import last_returns

if TYPE_CHECKING:
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.model import ModelRequest
    from smokebox.sandbox.api import SandboxApi
    from smokebox.server.settings import ServerSettings

_PROGRAM = ["python3", "-c", "print(6 * 7)"]
_PROMPT = "Which city spends most? Write the answer to answer.md."
_ORDERS = "city,amount\nLisbon,40\nOslo,120\nLisbon,310\nQuito,40\n"
_SUM = "awk -F, 'NR > 1 { sum[$1] += $2 } END { for (city in sum) print sum[city], city }' "

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

or an agent, with your API key:

  export ANTHROPIC_API_KEY=...
  {smokebox} chat --model anthropic/claude-sonnet-4-6 --sandbox mine

Ctrl-C stops this server. Sandboxes keep running: the next server takes them over.
"""

_HOME = """
  export SMOKEBOX_HOME={home}"""

_CURL = """  curl -s {url}/api/sandboxes/mine/exec -d '{{"command": "cat note.txt"}}' \\
    -H 'content-type: application/json'{key}
"""

_KEY_HEADER = """ \\
    -H "authorization: Bearer $({smokebox} keys create --name curl)\""""


def run(settings: ServerSettings, *, show: bool) -> None:
    """Serve until a signal; with `show`, run a demonstration and print what to try next."""

    async def ready(server: RunningServer) -> None:
        socket = f"unix:{server.socket}"
        where = socket if server.url is None else f"{server.url} and {socket}"
        typer.echo(f"smokebox {__version__} serves {where}")
        if show:
            await run_until_first(_welcome(server), server.state.drain.started.wait())

    request_log.configure(json=settings.log_json, level="warning" if show else "info")
    try:
        uvloop.run(serve(settings, ready))
    except Conflict as error:
        if error.fields.get("kind") == "home":
            error.hint = "`smokebox status` shows that server, `smokebox down` stops it."
        raise


def offered_buckets(folder: str) -> dict[str, OfferedBucket]:
    """Return the buckets of the smokebox.toml in a folder, with the credentials of its .env."""
    config = load_config(Path(folder))
    if not config.buckets:
        raise InvalidOption(
            f"no smokebox.toml in {folder} or above defines a bucket.",
            hint='Add [buckets.NAME] with bucket = "..." to it, or omit --buckets.',
            option="--buckets",
            value=folder,
        )
    return {
        name: OfferedBucket(
            bucket=one.target,
            prefix=one.prefix,
            read_only=one.read_only,
            access=with_environment(one.access),
        )
        for name, one in ((name, bucket_binding(config, name)) for name in config.buckets)
    }


async def _welcome(server: RunningServer) -> None:
    await _demonstrate(server.socket)
    smokebox, settings = _command("smokebox"), server.state.settings
    key = _KEY_HEADER.format(smokebox=smokebox) if settings.needs_keys else ""
    home = "" if settings.home == default_home() else _HOME.format(home=shlex.quote(settings.home))
    curl = "" if server.url is None else _CURL.format(url=server.url, key=key)
    typer.echo(_NEXT.format(smokebox=smokebox, curl=curl, home=home, python=_command("python")))


async def _demonstrate(socket: str) -> None:
    """Run a program and a scripted agent in a new sandbox of the server."""
    began = time.monotonic()
    try:
        async with connect(f"unix:{socket}") as client, await client.create() as sandbox:
            output = (await sandbox.exec(_PROGRAM, timeout=10)).stdout.strip()
            took = (time.monotonic() - began) * 1000
            program = shlex.join(_PROGRAM)
            typer.echo(f"It works: {program} in a new sandbox printed {output}, in {took:.0f} ms.")
            typer.echo(f"\nAn agent with a scripted model (no API key needed): {_PROMPT}")
            typer.echo((await _run_agent(sandbox)).rstrip())
    except SmokeboxError as error:
        report(error)
        typer.echo(f"{_command('smokebox')} doctor shows what this machine lacks.", err=True)


async def _run_agent(sandbox: SandboxApi) -> str:
    """Run an agent whose model is a script, show its work, and return what it wrote."""
    model = ScriptedModel(
        ["I'll add them up.\n", call("bash", command=f"{_SUM} orders.csv | sort -rn")],
        _write_answer,
        "Done: the answer is in answer.md.\n",
    )
    view = TextView()
    agent = create_agent(name="demo", model=model, sandbox=sandbox, persist=False)
    async with init(agent) as harness:
        await harness.fs.write_file("orders.csv", _ORDERS)
        operation = (await harness.session()).prompt(_PROMPT)
        async for event in operation:
            view.show(event)
        await operation
        return await harness.fs.read_file("answer.md")


def _write_answer(request: ModelRequest) -> ToolCall:
    amount, city = last_returns(request)[0].text.split()[:2]
    return call("write", path="answer.md", content=f"{city} spends most: {amount}.\n")


def _command(name: str) -> str:
    """Return the shortest way to call a program that is installed beside this Python."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    on_path = shutil.which(name)
    if not os.path.exists(beside) or (on_path and os.path.samefile(on_path, beside)):
        return name
    near = os.path.relpath(beside)
    return shlex.quote(beside if near.startswith("..") else near)
