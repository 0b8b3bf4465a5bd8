"""Interactive commands: sh, a shell in any kind of sandbox, and demo, a tour."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.completion import complete_sandboxes
from smokebox.cli.options import Env, parse_pairs
from smokebox.errors import InvalidOption, NotText

if TYPE_CHECKING:
    from smokebox.cli.shell.interactive import InteractiveShell


def sh(
    id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Sandbox ID; with --local, a directory.",
            autocompletion=complete_sandboxes,
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("-c", metavar="COMMAND", help="Run this command and exit with its code."),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run on this host, without isolation.")
    ] = False,
    bucket: Annotated[
        str | None, typer.Option(metavar="URL", help="Use an object store: s3://name, ...")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Endpoint of the bucket's service.")
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse writes to the bucket.")
    ] = False,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Do not sign requests to the bucket.")
    ] = False,
    env: Env = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Kill the command or script after this time."),
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Pass standard input to the command of -c.")
    ] = False,
) -> int:
    """Open a shell in a sandbox, or in a new virtual one.

    Without an ID, --local or --bucket, the shell runs in a virtual sandbox. Without a
    terminal, it runs the script on standard input. Ctrl-C stops a command, Ctrl-D exits.
    """
    _refuse(id is not None and bucket is not None, "ID and --bucket exclude each other")
    _refuse(local and bucket is not None, "--local and --bucket exclude each other")
    _refuse(endpoint is not None and bucket is None, "--endpoint needs --bucket")
    _refuse(read_only and bucket is None, "--read-only needs --bucket")
    _refuse(anonymous and bucket is None, "--anonymous needs --bucket")
    _refuse(stdin and command is None, "--stdin needs -c")
    variables = parse_pairs("--env", env) or {}
    if id is not None and not local:
        return _run_remote(id, command, variables, stdin=stdin, timeout=timeout)
    if local:
        shell = _open_local(id, variables)
    elif bucket is not None:
        shell = _open_bucket(
            bucket, endpoint=endpoint, read_only=read_only, anonymous=anonymous, env=variables
        )
    else:
        shell = _open_virtual(variables)
    with shell:
        if command is not None:
            return shell.run(command, stdin=_read_stdin() if stdin else None, timeout=timeout)
        if sys.stdin.isatty():
            return shell.interact()
        return shell.run(_read_script(), timeout=timeout)


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise InvalidOption(f"{message}.", hint="See `smokebox sh --help`.", option="sh")


def _read_stdin() -> bytes:
    return b"" if sys.stdin.isatty() else sys.stdin.buffer.read()


def _read_script() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise NotText(
            f"the script is not UTF-8 text (byte {error.start}).",
            hint="Pass text on standard input, or a command with -c.",
            path="-",
            offset=error.start,
        ) from error


def _run_remote(
    id: str,
    command: str | None,
    env: dict[str, str],
    *,
    stdin: bool,
    timeout: float | None,
) -> int:
    from smokebox.cli.shell.remote import open_shell, run_script

    if command is None and sys.stdin.isatty() and sys.stdout.isatty():
        return open_shell(id, env)
    data = _read_stdin() if stdin else None
    script = _read_script() if command is None else command
    return run_script(id, script, env, stdin=data, timeout=timeout)


def _open_virtual(env: dict[str, str]) -> InteractiveShell:
    from smokebox.cli.shell.directory import PersistentDirectory
    from smokebox.cli.shell.interactive import InteractiveShell
    from smokebox.sandbox.virtual import virtual

    sandbox = virtual(env=env)
    return InteractiveShell(sandbox, PersistentDirectory("virtual", sandbox))


def _open_local(directory: str | None, env: dict[str, str]) -> InteractiveShell:
    from smokebox.cli.shell.directory import HostDirectory
    from smokebox.cli.shell.interactive import InteractiveShell
    from smokebox.sandbox.local import local

    sandbox = local(cwd=os.path.abspath(directory or "."), env=env)
    return InteractiveShell(sandbox, HostDirectory(sandbox.cwd))


def _open_bucket(
    url: str, *, endpoint: str | None, read_only: bool, anonymous: bool, env: dict[str, str]
) -> InteractiveShell:
    from smokebox.cli.shell.directory import PersistentDirectory
    from smokebox.cli.shell.interactive import InteractiveShell
    from smokebox.sandbox.bucket import bucket

    sandbox = bucket(url, endpoint=endpoint, read_only=read_only, anonymous=anonymous, env=env)
    return InteractiveShell(sandbox, PersistentDirectory("bucket", sandbox))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the tour: what to say, and the command that shows it."""

    say: str
    command: str
    timeout: float | None = None


ORDERS = """\
date,city,item,amount
2031-03-01,Lisbon,lamp,40
2031-03-01,Oslo,chair,120
2031-03-02,Lisbon,desk,310
2031-03-04,Quito,lamp,40
2031-03-05,Oslo,lamp,42
"""

TOUR = (
    Step(
        say="This sandbox is in memory. Its files come from Python: files={'orders.csv': ...}.",
        command="pwd; ls; head -3 orders.csv",
    ),
    Step(
        say="It runs bash with the usual tools, without starting a process.",
        command="cut -d, -f2 orders.csv | tail -n +2 | sort | uniq -c | sort -rn",
    ),
    Step(
        say="awk, sed, jq, grep, find: the tools agents use are built in.",
        command="awk -F, 'NR > 1 { sum[$2] += $4 } END { for (c in sum) print c, sum[c] }' "
        "orders.csv | sort | tee totals.txt",
    ),
    Step(
        say="The shell keeps its state: variables, functions and the directory ...",
        command="best=$(sort -k2 -n totals.txt | tail -1); mkdir -p report && cd report",
    ),
    Step(
        say="... are there in the next command.",
        command='echo "# Best city: $best" > summary.md; pwd; cat summary.md',
    ),
    Step(
        say="A non-zero exit is a result, with bash's own codes: 127 is a missing program.",
        command="apt-get install everything",
    ),
    Step(
        say="The network is off until an allow-list opens it.",
        command="curl https://example.com/",
    ),
    Step(
        say="A runaway script is killed at its timeout, with exit code 124. This one has a second.",
        command="while :; do :; done",
        timeout=1,
    ),
    Step(
        say="The sandbox is still usable.",
        command="cd ..; find . -type f | sort; wc -c totals.txt",
    ),
)


def demo() -> int:
    """Tour a virtual sandbox, then try it yourself.

    Without a terminal, exits after the tour.
    """
    from smokebox.cli.shell.directory import PersistentDirectory
    from smokebox.cli.shell.interactive import InteractiveShell
    from smokebox.sandbox.virtual import virtual

    sandbox = virtual(files={"orders.csv": ORDERS})
    with InteractiveShell(sandbox, PersistentDirectory("virtual", sandbox)) as shell:
        for step in TOUR:
            _run_step(shell, step)
        if sys.stdin.isatty():
            typer.secho("\nYour turn: type a command.", fg="cyan")
            shell.interact()
    return 0


def _run_step(shell: InteractiveShell, step: Step) -> None:
    typer.secho(f"\n{step.say}", fg="cyan")
    typer.secho(f"$ {step.command}", bold=True)
    code = shell.run(step.command, timeout=step.timeout)
    if code:
        typer.secho(f"(exit code {code})", fg="yellow")
