"""The errors of lasting processes, in words that say which process, what was waited for, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.processes.logs import tail
from smokebox.errors import (
    DeadlineExceeded,
    ProcessEnded,
    SandboxGone,
    SandboxRestarted,
    Unsupported,
)

if TYPE_CHECKING:
    from smokebox.engine.processes.logs import Log
    from smokebox.engine.record.rows import ProcessRow

_LAST_BYTES = 2048
_LAST_LINES = 5


def ended_before(row: ProcessRow, log: Log, what: str) -> ProcessEnded:
    """It ended while somebody waited for it `what` ("to log 'x'", "for port 80 ...")."""
    said = last_lines(log.path("stderr")) or last_lines(log.path("stdout"))
    return ProcessEnded(
        f"process {row.process_id} (`{row.command:.80}`) ended with exit code {row.exit_code} "
        f"before it came {what}." + (f" Its last lines: {said}" if said else ""),
        hint="Look at its logs().",
        process=row.process_id,
        exit_code=row.exit_code,
    )


def too_late(row: ProcessRow, what: str, timeout: float) -> DeadlineExceeded:
    """It went on for longer than somebody wanted to wait."""
    return DeadlineExceeded(
        f"waited {timeout:g} s for process {row.process_id} (`{row.command:.80}`) {what}.",
        hint="Pass a longer timeout, or look at its logs().",
        operation=what,
        process=row.process_id,
        timeout=timeout,
    )


def run_ended(row: ProcessRow, sandbox: str, reason: str, *, destroyed: bool) -> SandboxGone:
    """Its sandbox stopped, and it with it."""
    kind = SandboxGone if destroyed else SandboxRestarted
    return kind(
        f"process {row.process_id} (`{row.command:.80}`) ended with a run of the sandbox "
        f"{sandbox}: {reason}.",
        hint="Start another sandbox." if destroyed else "Start the process again.",
        reason=reason,
        sandbox_id=sandbox,
        process=row.process_id,
    )


def no_stdin(row: ProcessRow) -> Unsupported:
    """It was started without a stdin to write to."""
    return Unsupported(
        f"process {row.process_id} has no stdin to write to.",
        hint="Start it with stdin=True.",
        operation="write_stdin",
    )


def last_lines(path: str) -> str:
    """The end of a log in one line, with nothing in it that a terminal would obey."""
    lines = tail(path, _LAST_BYTES).splitlines()[-_LAST_LINES:]
    text = " | ".join(line.strip() for line in lines if line.strip())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
