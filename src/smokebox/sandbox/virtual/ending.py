"""How a script ended: what the engine says, in the exit codes and words of bash."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bashkit import ExecResult as EngineResult

SYNTAX_ERROR, TIMED_OUT, LIMITED, ABORTED, KILLED = 2, 124, 126, 134, 137

_SYNTAX = re.compile(r"parse error(?: at line (?P<line>\d+), column \d+)?: (?P<what>.*)", re.S)
_LIMIT = re.compile(r"limit exceeded|budget|exceeded|too large", re.I)
_ADVICE = {
    "command count": "commands",
    "loop iterations": "loop_iterations",
    "memory limit": "memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of one script.

    `stdout` and `stderr` are the whole streams, or None where the engine dropped them and
    only what was heard on the way is left. `message` belongs after that on stderr. With
    `broken`, the shell holds more than it may and can do nothing else.
    """

    exit_code: int
    stdout: str | None = None
    stderr: str | None = None
    truncated: bool = False
    timed_out: bool = False
    message: str = ""
    broken: bool = False


CLOSED = Ending(exit_code=KILLED, message="smokebox: stopped because the sandbox was closed\n")


def ending_of(result: EngineResult, wall_time: float) -> Ending:
    """What an engine's result means."""
    error = result.error
    if error is None:
        return Ending(
            exit_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
            truncated=result.stdout_truncated or result.stderr_truncated,
        )
    if syntax := _SYNTAX.match(error):
        line = f"line {syntax['line']}: " if syntax["line"] else ""
        return Ending(exit_code=SYNTAX_ERROR, message=f"bash: {line}{syntax['what']}\n")
    if "execution timeout" in error:
        return timed_out(wall_time, of_limit=True)
    if "cancelled" in error:
        return CLOSED
    if _LIMIT.search(error):
        broken = "memory limit" in error
        words = f"smokebox: stopped: {_limit_words(error)}\n{RESTARTED if broken else ''}"
        return Ending(exit_code=LIMITED, message=words, broken=broken)
    return Ending(exit_code=result.exit_code or 1, message=f"bash: {error}\n")


def timed_out(seconds: float, *, of_limit: bool, lost: bool = False) -> Ending:
    """The end of a script that took too long.

    With `lost` it could not be stopped, and the shell had to be given up.
    """
    message = f"smokebox: timed out after {seconds:g} s"
    if of_limit:
        message += " (raise Limits.wall_time for more)"
    message = f"{message}\n{LOST if lost else ''}"
    return Ending(exit_code=TIMED_OUT, timed_out=True, message=message)


def outgrown(limit: int, *, lost: bool) -> Ending:
    """The end of a script under which the process grew too much."""
    words = f"the process grew by more than {limit} bytes (raise Limits.process_growth for more)"
    return Ending(exit_code=LIMITED, message=f"smokebox: stopped: {words}\n{LOST if lost else ''}")


RESTARTED = (
    "smokebox: the shell was restarted in the same directory, with exported variables only\n"
)
LOST = f"smokebox: a command that did not stop was left behind\n{RESTARTED}"


def _limit_words(error: str) -> str:
    words = re.sub(r"^(resource limit exceeded|execution error): ", "", error)
    for key, field in _ADVICE.items():
        if key in words:
            return f"{words} (raise Limits.{field} for more)"
    return f"{words} (a fixed limit of the virtual shell)"
