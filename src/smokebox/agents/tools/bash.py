"""The bash tool: runs a command; of a long output it shows the end and keeps the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.output import (
    MAX_BYTES,
    MAX_LINES,
    OUTPUT_DIRECTORY,
    OutputBuffer,
    OutputFiles,
)
from smokebox.agents.tools.tool import OnOutput, Tool, ToolResult, failure
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

DEFAULT_TIMEOUT = 120.0
MAX_TIMEOUT = 600.0


def bash_tool(
    sandbox: SandboxApi,
    *,
    default_timeout: float = DEFAULT_TIMEOUT,
    max_timeout: float = MAX_TIMEOUT,
    output_directory: str = OUTPUT_DIRECTORY,
) -> Tool:
    """Return the tool `bash` for a sandbox. `on_output` gets output while a command runs.

    Args:
        sandbox: Where commands run.
        default_timeout: Seconds for a command whose call names no timeout.
        max_timeout: Upper limit of the timeout that a call may name.
        output_directory: Directory in the sandbox for the last 16 outputs too long to show.
    """
    if not 0 < default_timeout <= max_timeout:
        raise InvalidOption(
            f"default_timeout={default_timeout} is not between 0 and max_timeout={max_timeout}.",
            hint="Pass seconds, default_timeout at most max_timeout.",
            option="default_timeout",
            value=default_timeout,
        )
    files = OutputFiles(sandbox, output_directory)

    async def bash(
        command: str, on_output: OnOutput | None, timeout: float = default_timeout
    ) -> ToolResult:
        if "\0" in command:
            return failure("command has a NUL character, which no shell accepts. Remove it.")
        allowed = min(timeout, max_timeout)
        output = OutputBuffer()
        async with sandbox.exec_stream(command, timeout=allowed) as stream:
            async for chunk in stream:
                output.add(chunk.data)
                if on_output is not None:
                    on_output(chunk)
        result = stream.result
        parts = [await output.render(files, result) or "(no output)"]
        if timeout > allowed:
            parts.append(
                f"[timeout={timeout} is above the maximum; {allowed:g} seconds were allowed.]"
            )
        if result.timed_out:
            seconds = min(allowed, result.duration)
            parts.append(f"Command timed out after {seconds:.3g} seconds")
        elif not result.success:
            parts.append(f"Command exited with code {result.exit_code}")
        return ToolResult(text="\n\n".join(parts))

    return Tool(
        name="bash",
        description=_description(default_timeout, max_timeout),
        parameters=_parameters(default_timeout, max_timeout),
        function=bash,
        streams=True,
    )


def _description(default_timeout: float, max_timeout: float) -> str:
    return (
        "Run a bash command in the working directory, without a terminal and with no input. "
        "Returns standard output and standard error in the order they were written; past "
        f"{MAX_LINES} lines or {MAX_BYTES // 1024} KiB only the end is shown, and the first line "
        "names the file with the whole output. A command that runs longer than its timeout "
        f"(default {default_timeout:g} seconds, at most {max_timeout:g}) is killed with all "
        "processes it started; its output so far is kept. To read, write, edit or search files, "
        "prefer the tools made for it."
    )


def _parameters(default_timeout: float, max_timeout: float) -> dict[str, object]:
    timeout = f"Seconds to allow. Default {default_timeout:g}, at most {max_timeout:g}."
    return {
        "type": "object",
        "properties": {
            "command": {"type": "string", "minLength": 1, "description": "The bash script to run."},
            "timeout": {"type": "number", "exclusiveMinimum": 0, "description": timeout},
        },
        "required": ["command"],
        "additionalProperties": False,
    }
