"""The bash tool: runs a command, shows the end of a long output, and keeps all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.tools.output import MAX_BYTES, MAX_LINES, CommandOutput, OutputFiles
from smokebox.agents.tools.tool import OnOutput, Tool, ToolResult, failure
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import ExecResult

DEFAULT_TIMEOUT = 120.0
MAX_TIMEOUT = 600.0
OUTPUT_DIRECTORY = "/tmp"


def bash_tool(
    sandbox: SandboxApi,
    *,
    default_timeout: float = DEFAULT_TIMEOUT,
    max_timeout: float = MAX_TIMEOUT,
    output_directory: str = OUTPUT_DIRECTORY,
) -> Tool:
    """`bash`, over `sandbox`. Its output goes to `on_output` while the command runs.

    The last sixteen outputs too long to show are kept in `output_directory`.
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
            return failure("command holds a NUL character, which no shell can take. Remove it.")
        allowed = min(timeout, max_timeout)
        output = CommandOutput()
        async with sandbox.exec_stream(command, timeout=allowed) as stream:
            async for chunk in stream:
                output.add(chunk.data)
                if on_output is not None:
                    on_output(chunk)
        notes = [_clamped(timeout, allowed)] if timeout > allowed else []
        notes.append(_ending(stream.result, allowed))
        shown = await output.shown(files, stream.result)
        return ToolResult(text="\n\n".join(filter(None, [shown or "(no output)", *notes])))

    return Tool(
        name="bash",
        description=_description(default_timeout, max_timeout),
        parameters=_parameters(default_timeout, max_timeout),
        function=bash,
        streams=True,
    )


def _clamped(timeout: float, allowed: float) -> str:
    return f"[timeout={timeout} is above the maximum; {allowed:g} seconds were allowed.]"


def _ending(result: ExecResult, allowed: float) -> str:
    if result.timed_out:
        return f"Command timed out after {min(allowed, result.duration):.3g} seconds"
    return "" if result.success else f"Command exited with code {result.exit_code}"


def _description(default_timeout: float, max_timeout: float) -> str:
    return (
        "Run a bash command in the working directory, without a terminal and with no input. "
        "Standard output and standard error come back as they were written; past "
        f"{MAX_LINES} lines or {MAX_BYTES // 1024} KiB only the end is shown, and the first line "
        "names the file that holds all of it. A command that runs longer than its timeout "
        f"(default {default_timeout:g} seconds, at most {max_timeout:g}) is killed with all it "
        "started; its output so far is kept. To read, write, edit or search files, prefer the "
        "tools made for it."
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
