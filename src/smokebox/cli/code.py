"""`smokebox code`: code in a sandbox, which finds what the code before it did."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smokebox.cli.options import AsJson, Env, Id  # noqa: TC001
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client

_BY_SUFFIX = {
    ".js": "javascript",
    ".mjs": "javascript",
    ".ts": "typescript",
    ".mts": "typescript",
}


def code(
    id: Id,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A file of yours; - is standard input.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", "-c", metavar="CODE", help="The code itself.")
    ] = None,
    language: Annotated[
        Literal["python", "javascript", "typescript"] | None,
        typer.Option("--language", "-l", help="By default what the name of the file says."),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="ID", help="Not in the default context.")
    ] = None,
    env: Env = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-t", metavar="SECONDS", help="Interrupt it after this: 124."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make the sandbox if it is not there.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run code in a sandbox, where its names stay for the next.

    What it writes and shows is printed as it comes. An error in it is exit code 1. Ctrl-C
    interrupts it. For example: smokebox code box -c '6 * 7'
    """
    from smokebox.cli.given import parse_pairs
    from smokebox.cli.remote.coding import show
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    text = _read(file, command)
    named: str | None = language
    if language is None and context is None and file is not None:
        named = _BY_SUFFIX.get(file.suffix)
    variables = parse_pairs("--env", env)

    async def work(client: Client) -> int:
        sandbox = await find(client, id, create=create)
        running = sandbox.run_code_stream(
            text, context=context, language=named, env=variables, timeout=timeout
        )
        return await show(running, as_json=as_json)

    return talk(work)


def _read(file: Path | None, command: str | None) -> str:
    if (file is None) == (command is None):
        raise InvalidOption(
            "code comes from a file or from -c, and from one of them.",
            hint="Pass for example -c 'print(1)', or script.py, or - for standard input.",
            option="command",
        )
    if command is not None:
        return command
    assert file is not None
    data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidOption(
            f"{file} is not UTF-8 text (byte {error.start}).",
            hint="Save it as UTF-8.",
            option="file",
        ) from error
