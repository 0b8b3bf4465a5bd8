"""`smokebox sh`: a shell in a sandbox: by its id, virtual, on this host, or over a bucket."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.errors import InvalidOption, NotText

if TYPE_CHECKING:
    from smokebox.cli.shell.session import Shell


def sh(
    id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="The sandbox, or with --local the directory."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("-c", metavar="COMMAND", help="Run this command and exit with its code."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Work on this host, unisolated.")] = False,
    bucket: Annotated[
        str | None, typer.Option(metavar="URL", help="Work in an object store: s3://name, ...")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Where the service is, with --bucket.")
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse writes, with --bucket.")
    ] = False,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Sign nothing, with --bucket.")
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set a variable. Repeatable."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End the command of -c, or the script, after this."),
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Give standard input to the command of -c.")
    ] = False,
) -> int:
    """Open a shell in a sandbox: by its id, or one in memory.

    Without an id it is a virtual sandbox, unless --local or --bucket is given. Without a
    terminal, the script on standard input is run. Ctrl-C stops a command, and Ctrl-D leaves
    the shell.
    """
    _refuse(id is not None and bucket is not None, "ID and --bucket exclude each other")
    _refuse(local and bucket is not None, "--local and --bucket exclude each other")
    _refuse(endpoint is not None and bucket is None, "--endpoint goes with --bucket")
    _refuse(read_only and bucket is None, "--read-only goes with --bucket")
    _refuse(anonymous and bucket is None, "--anonymous goes with --bucket")
    _refuse(stdin and command is None, "--stdin goes with -c")
    variables = dict(_variable(text) for text in env or [])
    if id is not None and not local:
        return _run_there(id, command, variables, stdin=stdin, timeout=timeout)
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


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise InvalidOption(f"{message}.", hint="See `smokebox sh --help`.", option="sh")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    _refuse(not equals, f"--env takes NAME=VALUE, not {text!r}")
    return name, value


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


def _run_there(
    id: str,
    command: str | None,
    env: dict[str, str],
    *,
    stdin: bool,
    timeout: float | None,
) -> int:
    from smokebox.cli.remote.shell import open_shell, run_script

    if command is None and sys.stdin.isatty() and sys.stdout.isatty():
        return open_shell(id, env)
    given = _read_stdin() if stdin else None
    script = _read_script() if command is None else command
    return run_script(id, script, env, stdin=given, timeout=timeout)


def _open_virtual(env: dict[str, str]) -> Shell:
    from smokebox.cli.shell.directory import PersistentDirectory
    from smokebox.cli.shell.session import Shell
    from smokebox.sandbox.virtual import virtual

    sandbox = virtual(env=env)
    return Shell(sandbox, PersistentDirectory("virtual", sandbox))


def _open_local(directory: str | None, env: dict[str, str]) -> Shell:
    from smokebox.cli.shell.directory import HostDirectory
    from smokebox.cli.shell.session import Shell
    from smokebox.sandbox.local import local

    sandbox = local(cwd=os.path.abspath(directory or "."), env=env)
    return Shell(sandbox, HostDirectory(sandbox.cwd))


def _open_bucket(
    url: str, *, endpoint: str | None, read_only: bool, anonymous: bool, env: dict[str, str]
) -> Shell:
    from smokebox.cli.shell.directory import PersistentDirectory
    from smokebox.cli.shell.session import Shell
    from smokebox.sandbox.bucket import bucket

    sandbox = bucket(url, endpoint=endpoint, read_only=read_only, anonymous=anonymous, env=env)
    return Shell(sandbox, PersistentDirectory("bucket", sandbox))
