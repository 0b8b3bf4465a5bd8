"""`smokebox logs`: what a process has written, or the server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.errors import InvalidOption, NotFound

if TYPE_CHECKING:
    from smokebox.client.client import Client

_POLL = 0.1


def logs(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The sandbox.")] = None,
    process: Annotated[
        str | None, typer.Argument(metavar="[PROCESS]", help="The process in it.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written until it ends.")
    ] = False,
) -> int:
    """Print the log of a process, or of the server.

    Without arguments it is that of the server in the background; `smokebox serve` writes its
    own to its terminal.
    """
    if id is None:
        _print_server_log(follow=follow)
        return 0
    if process is None:
        raise InvalidOption(
            "logs takes a sandbox and a process in it.",
            hint=f"`smokebox ps {id}` lists them; `smokebox logs` alone is the server's log.",
            option="process",
        )
    return _print_logs(id, process, follow=follow)


def _print_logs(id: str, process: str, *, follow: bool) -> int:
    from smokebox.cli.remote.finding import find, process_of
    from smokebox.cli.remote.running import write
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        found = await process_of(await find(client, id), process)
        async for chunk in found.stream_logs(follow=follow):
            write(chunk.stream, chunk.data)

    return talk(work)


def _print_server_log(*, follow: bool) -> None:
    from smokebox.wire.place import default_home, log_path

    path = log_path(default_home())
    try:
        file = open(path, errors="replace")  # noqa: SIM115
    except FileNotFoundError:
        raise NotFound(
            "no server has run in the background here.",
            hint="`smokebox up` starts one; `smokebox serve` logs to its terminal.",
            kind="log",
            name=path,
        ) from None
    with file:
        while True:
            while text := file.read(1 << 16):
                typer.echo(text, nl=False)
            if not follow:
                return
            time.sleep(_POLL)
