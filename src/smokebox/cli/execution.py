"""Commands that run something in a sandbox: exec, once, code."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smokebox.cli.image_build import prepare_image
from smokebox.cli.options import (
    AsJson,
    Command,
    Create,
    Cwd,
    Egress,
    Env,
    Id,
    Image,
    Limits,
    Mirrors,
    Stdin,
    Tier,
    Timeout,
    User,
    parse_command,
    parse_pairs,
    settings_of,
)
from smokebox.cli.output import print_json, write_chunk
from smokebox.cli.remote import find_sandbox, print_output, run_with_client, temporary_sandbox
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.sandbox.code import CodeStream
    from smokebox.types import CodeError, CodeResult, OutputChunk, Stream

FAILED, TIMED_OUT = 1, 124
_LANGUAGES = {
    ".js": "javascript",
    ".mjs": "javascript",
    ".ts": "typescript",
    ".mts": "typescript",
}
# The first of these that a result has is printed.
_TEXTS = ("text", "markdown", "latex", "html", "svg", "javascript")


def exec_command(
    id: Id,
    command: Command,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout: Timeout = None,
    session: Annotated[
        str | None,
        typer.Option("--session", "-s", metavar="ID", help="Run in this shell session."),
    ] = None,
    stdin: Stdin = False,
    create: Create = False,
) -> int:
    """Run a command in a sandbox.

    Streams its output and exits with its exit code. Ctrl-C kills it. Output is decoded as
    text; use `smokebox cp` for binary files.
    """
    variables = parse_pairs("--env", env)
    data = sys.stdin.buffer.read() if stdin else None

    async def work(client: Client) -> int:
        sandbox = await find_sandbox(client, id, create=create)
        return await print_output(
            sandbox.exec_stream(
                parse_command(command),
                cwd=cwd,
                env=variables,
                timeout=timeout,
                stdin=data,
                user=user,
                session=session,
            )
        )

    return run_with_client(work)


def once(
    command: Command,
    image: Image = None,
    limits: Limits = None,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    tier: Tier = None,
    egress: Egress = None,
    mirrors: Mirrors = False,
    timeout: Timeout = None,
    stdin: Stdin = False,
) -> int:
    """Run a command in a new sandbox, then remove the sandbox.

    For example: smokebox once -- python3 -c 'print(6 * 7)'
    """
    settings = settings_of(
        image=image,
        limits=limits,
        env=env,
        cwd=cwd,
        user=user,
        tier=tier,
        egress=egress,
        mirrors=mirrors,
        ephemeral=True,
    )
    data = sys.stdin.buffer.read() if stdin else None

    async def work(client: Client) -> int:
        await prepare_image(client, settings)
        async with temporary_sandbox(client, settings) as sandbox:
            return await print_output(
                sandbox.exec_stream(parse_command(command), timeout=timeout, stdin=data)
            )

    return run_with_client(work)


def code(
    id: Id,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Local file; - is standard input.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", "-c", metavar="CODE", help="Code to run.")
    ] = None,
    language: Annotated[
        Literal["python", "javascript", "typescript"] | None,
        typer.Option("--language", "-l", help="Language; by default that of the file's suffix."),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="ID", help="Code context to run in.")
    ] = None,
    env: Env = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", "-t", metavar="SECONDS", help="Interrupt after this time (exit code 124)."
        ),
    ] = None,
    create: Create = False,
    as_json: AsJson = False,
) -> int:
    """Run code in a sandbox; variables are kept for the next run.

    Prints output and results as they come. Exits with 1 if the code raises. Ctrl-C
    interrupts it. For example: smokebox code mine -c '6 * 7'
    """
    text = _read_code(file, command)
    chosen: str | None = language
    if language is None and context is None and file is not None:
        chosen = _LANGUAGES.get(file.suffix)
    variables = parse_pairs("--env", env)

    async def work(client: Client) -> int:
        sandbox = await find_sandbox(client, id, create=create)
        running = sandbox.run_code_stream(
            text, context=context, language=chosen, env=variables, timeout=timeout
        )
        return await _print_execution(running, as_json=as_json)

    return run_with_client(work)


def _read_code(file: Path | None, command: str | None) -> str:
    if (file is None) == (command is None):
        raise InvalidOption(
            "code takes either FILE or -c CODE.",
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


async def _print_execution(running: CodeStream, *, as_json: bool) -> int:
    """Print output and results of code, or all of it as JSON at the end.

    Returns the exit code. Cancelling interrupts the code.
    """
    from smokebox.types import CodeResult, OutputChunk

    results: list[CodeResult] = []
    output: dict[Stream, str] = {"stdout": "", "stderr": ""}
    async with running as events:
        async for event in events:
            if not as_json:
                _print_event(event)
            elif isinstance(event, OutputChunk):
                output[event.stream] += event.data
            elif isinstance(event, CodeResult):
                results.append(event)
    execution = running.execution
    if as_json:
        stdout, stderr = output.values()
        print_json(replace(execution, results=tuple(results), stdout=stdout, stderr=stderr))
    if execution.timed_out:
        return TIMED_OUT
    return 0 if execution.success else FAILED


def _print_event(event: OutputChunk | CodeResult | CodeError) -> None:
    from smokebox.types import CodeError, OutputChunk

    if isinstance(event, OutputChunk):
        write_chunk(event.stream, event.data)
    elif isinstance(event, CodeError):
        message = f"{event.name}: {event.message}"
        text = event.traceback.rstrip() if message in event.traceback else message
        write_chunk("stderr", f"{text}\n")
    else:
        texts = (getattr(event, name) for name in _TEXTS)
        write_chunk("stdout", f"{next(filter(None, texts), '')}\n")
        for name in ("png", "jpeg", "pdf"):
            if (data := getattr(event, name)) is not None:
                write_chunk("stderr", f"[{name}, {len(data)} bytes: use --json to get it]\n")
