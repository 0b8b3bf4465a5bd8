"""Commands on background processes: start, ps, logs, kill."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.completion import complete_processes, complete_sandboxes
from smokebox.cli.options import AsJson, Command, Cwd, Env, Id, User, parse_command, parse_pairs
from smokebox.cli.output import format_age, print_json, print_table, write_chunk
from smokebox.cli.remote import find_process, find_sandbox, run_with_client
from smokebox.errors import InvalidOption, NotFound

if TYPE_CHECKING:
    from smokebox.client.client import Client

_POLL = 0.1


def start(
    id: Id,
    command: Command,
    name: Annotated[
        str | None, typer.Option(metavar="ID", help="Process ID; random by default.")
    ] = None,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-t", metavar="SECONDS", help="Kill it after this time."),
    ] = None,
) -> int:
    """Start a background process and print its ID."""
    variables = parse_pairs("--env", env)

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        process = await sandbox.start_process(
            parse_command(command),
            process_id=name,
            cwd=cwd,
            env=variables,
            user=user,
            timeout=timeout,
        )
        typer.echo(process.id)

    return run_with_client(work)


def ps(id: Id, as_json: AsJson = False) -> int:
    """List the background processes of a sandbox, running and finished."""

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        processes = [process.info for process in await sandbox.list_processes()]
        if as_json:
            print_json(processes)
            return
        print_table(
            ("ID", "STATUS", "PID", "CODE", "STARTED", "COMMAND"),
            [
                (
                    one.id,
                    one.status,
                    "-" if one.pid is None else str(one.pid),
                    "-" if one.exit_code is None else str(one.exit_code),
                    format_age(one.started_at),
                    " ".join(one.command.split()),
                )
                for one in processes
            ],
        )

    return run_with_client(work)


def logs(
    id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Sandbox ID.", autocompletion=complete_sandboxes),
    ] = None,
    process: Annotated[
        str | None,
        typer.Argument(metavar="[PROCESS]", help="Process ID.", autocompletion=complete_processes),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the process ends.")
    ] = False,
) -> int:
    """Print the log of a process, or of the server.

    Without arguments, prints the log of the background server; `smokebox serve` logs to its
    terminal.
    """
    if id is None:
        _print_server_log(follow=follow)
        return 0
    if process is None:
        raise InvalidOption(
            "logs takes the ID of a sandbox and of a process in it.",
            hint=f"`smokebox ps {id}` lists them; `smokebox logs` alone prints the server's log.",
            option="process",
        )
    sandbox_id, process_id = id, process

    async def work(client: Client) -> None:
        target = await find_process(await find_sandbox(client, sandbox_id), process_id)
        async for chunk in target.stream_logs(follow=follow):
            write_chunk(chunk.stream, chunk.data)

    return run_with_client(work)


def _print_server_log(*, follow: bool) -> None:
    from smokebox.foundation.endpoint import default_home, log_path

    path = log_path(default_home())
    try:
        file = open(path, errors="replace")  # noqa: SIM115
    except FileNotFoundError:
        raise NotFound(
            f"there is no log of a background server at {path}.",
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


def kill(
    id: Id,
    processes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROCESS...", help="Process IDs.", autocompletion=complete_processes
        ),
    ] = None,
    signal: Annotated[
        str | None,
        typer.Option("--signal", "-s", metavar="NAME", help="Only send this signal."),
    ] = None,
    kill_all: Annotated[bool, typer.Option("--all", help="Kill all processes.")] = False,
) -> int:
    """Kill processes and their children.

    Sends SIGTERM, and SIGKILL to those that have not ended after a grace period.
    """
    if bool(processes) == kill_all:
        raise InvalidOption(
            "kill takes IDs of processes, or --all.",
            hint=f"`smokebox ps {id}` lists them.",
            option="kill",
        )
    number = int(signal) if signal is not None and signal.isdecimal() else signal

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        if kill_all:
            await sandbox.kill_all_processes(number)
        for process in processes or ():
            await (await find_process(sandbox, process)).kill(number)

    return run_with_client(work)
