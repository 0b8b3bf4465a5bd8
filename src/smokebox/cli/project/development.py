"""Development server: routes and examples to print, files to reload, and a bounded exit."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import threading
from typing import TYPE_CHECKING

import typer

from smokebox.app.definitions import ServedAgent
from smokebox.cli.output import report
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.app.app import App
    from smokebox.app.project import AppProject, Served

_KEY_HEADER = """ \\
    -H "authorization: Bearer $SMOKEBOX_APP_KEY\""""
SCAN_SECONDS = 0.5
_EXIT_SECONDS = 5.0
_SUFFIXES = (".py", ".toml", ".md", ".env")
_IGNORED = frozenset(("__pycache__", "node_modules", "dist", "build", "venv"))


def print_routes(project: AppProject) -> None:
    """Print each agent and workflow with its URL, and the error of each file that failed."""
    for name, agent in project.agents.items():
        typer.echo(f"  POST /agents/{name}/{{id}}{_describe(agent)}")
    for name, workflow in project.workflows.items():
        typer.echo(f"  POST /workflows/{name}{_describe(workflow)}")
    if project.site is not None:
        typer.echo("  and the routes of app.py")
    for fault in project.faults.values():
        typer.secho(f"  {fault.message}", err=True, fg="red")
        if fault.hint:
            typer.echo(f"    {fault.hint}", err=True)


def print_examples(project: AppProject, url: str, *, keys: bool) -> None:
    """Print a curl command for the first agent and the first workflow."""
    key = _KEY_HEADER if keys else ""
    typer.echo("\nTry from another shell:\n")
    for name, agent in list(project.agents.items())[:1]:
        body = '{"message": "Hello"}' if isinstance(agent, ServedAgent) else "{}"
        typer.echo(f"  curl '{url}/agents/{name}/me?wait=result' -d '{body}'{key}")
    for name in list(project.workflows)[:1]:
        body = '{"document": "# Plan"}' if name == "review" else "{}"
        typer.echo(f"  curl '{url}/workflows/{name}?wait=result' -d '{body}'{key}")
    typer.echo("\nChanged files are reloaded. Ctrl-C stops.\n")


def _describe(served: Served) -> str:
    if isinstance(served, ServedAgent):
        return f"   {served.agent.description}".rstrip()
    text = "" if served.schedule is None else f"   {served.schedule}"
    if not served.trigger.open:
        return f"{text}   (not open to requests)"
    return text if served.trigger.signature is None else f"{text}   (signed)"


async def reload_changes(app: App, root: Path) -> None:
    """Reload files of the project as they change, until cancelled."""
    async for changed in _changes(root):
        typer.secho(f"{', '.join(changed)} changed", fg="blue")
        for file in changed:
            if file.endswith(".py"):
                # Python compares bytecode to seconds: a second change within one is not seen.
                with contextlib.suppress(OSError):
                    os.unlink(importlib.util.cache_from_source(str(root / file)))
        try:
            # On a thread, so that requests are served while a file is imported.
            print_routes(await asyncio.to_thread(app.reload))
        except SmokeboxError as error:
            # The former version is still served.
            report(error)


async def _changes(folder: Path) -> AsyncIterator[list[str]]:
    """Yield the names of files that were written, created or removed."""
    before = await asyncio.to_thread(scan, str(folder))
    while True:
        await asyncio.sleep(SCAN_SECONDS)
        after = await asyncio.to_thread(scan, str(folder))
        if after != before:
            # An editor writes several files, or one in several steps: wait until it is done.
            while (later := await asyncio.to_thread(scan, str(folder))) != after:
                after = later
            changed = dict(before.items() ^ after.items())
            before = after
            yield sorted(changed)


def scan(folder: str, suffixes: str | tuple[str, ...] = _SUFFIXES) -> dict[str, tuple[int, int]]:
    """Return time and size of the files below a folder whose names end in one of `suffixes`."""
    stamps: dict[str, tuple[int, int]] = {}
    for root, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith(".") and one not in _IGNORED]
        for file in files:
            if file.endswith(suffixes):
                path = os.path.join(root, file)
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                stamps[os.path.relpath(path, folder)] = (status.st_mtime_ns, status.st_size)
    return stamps


def exit_soon(seconds: float = _EXIT_SECONDS) -> None:
    """Exit this process after `seconds`, whatever still runs in it.

    For when everything is closed: a workflow that ignores its cancellation, or a tool that
    blocks a thread, would otherwise be waited for without end.
    """
    timer = threading.Timer(seconds, _exit)
    timer.daemon = True
    timer.start()


def _exit() -> None:
    sys.stderr.write("smokebox: abandoned work that did not end.\n")
    sys.stderr.flush()
    os._exit(0)
