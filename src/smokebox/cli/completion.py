"""`smokebox completion`: typer's completion scripts, and ids of the server that they offer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from smokebox.client.client import Client

# The user waits for it; a slow server offers nothing.
_SECONDS = 1.0


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Name of the shell.")],
) -> int:
    """Print the completion script of a shell.

    In ~/.bashrc: eval "$(smokebox completion bash)"

    In ~/.zshrc, after compinit: eval "$(smokebox completion zsh)"

    In ~/.config/fish/config.fish: smokebox completion fish | source
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(
        get_completion_script(prog_name="smokebox", complete_var="_SMOKEBOX_COMPLETE", shell=shell)
    )
    return 0


def complete_sandboxes(ctx: typer.Context) -> list[tuple[str, str]]:
    """Offer the ids of sandboxes that the command line does not name yet."""
    return [pair for pair in _sandboxes() if pair[0] not in (ctx.params.get("ids") or ())]


def complete_remote_paths() -> list[tuple[str, str]]:
    """Offer the ids of sandboxes with the colon that a path follows."""
    return [(f"{id}:", status) for id, status in _sandboxes()]


def complete_processes(ctx: typer.Context) -> list[tuple[str, str]]:
    """Offer the ids of processes in the sandbox that the command line names."""
    id = ctx.params.get("id")

    async def processes(client: Client) -> list[tuple[str, str]]:
        sandbox = client.sandbox(str(id))
        if await sandbox.info() is None:
            return []
        return [(process.id, process.command) for process in await sandbox.list_processes()]

    return _request(processes) if id else []


def _sandboxes() -> list[tuple[str, str]]:
    async def sandboxes(client: Client) -> list[tuple[str, str]]:
        return [(info.id, info.status) for info in await client.list()]

    return _request(sandboxes)


def _request(
    work: Callable[[Client], Coroutine[Any, Any, list[tuple[str, str]]]],
) -> list[tuple[str, str]]:
    """Call `work` with a client of the running server; return nothing without one or on error."""
    import asyncio

    from smokebox.client.background import find
    from smokebox.client.client import URL, connect
    from smokebox.errors import SmokeboxError

    if URL not in os.environ and find() is None:
        # A client would start one.
        return []

    async def main() -> list[tuple[str, str]]:
        async with asyncio.timeout(_SECONDS), connect() as client:
            return await work(client)

    try:
        return asyncio.run(main())
    except (SmokeboxError, OSError):
        return []
