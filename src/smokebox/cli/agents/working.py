"""One piece of an agent's work in the foreground: shown as it goes, called off by Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import typer

from smokebox.agents.events import ApprovalNeeded
from smokebox.cli.notice import notice
from smokebox.errors import Aborted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.agents.operation import Operation
    from smokebox.agents.session import Session
    from smokebox.cli.agents.showing import View

ABORTED = 130


async def watch(session: Session, operation: Operation[Any], view: View) -> int:
    """Show an operation to its end, and give the exit code that stands for it."""
    with _stopped_by_signals(operation):
        async for event in operation:
            view.show(event)
            if isinstance(event, ApprovalNeeded):
                await _answer(session, event)
        try:
            await operation
        except Aborted as error:
            typer.secho(f"smokebox: {error.message}", err=True, fg="yellow")
            return ABORTED
    return 0


async def finish(session: Session, view: View) -> None:
    """See work to its end that a process left when it was killed."""
    if (left := session.running) is not None:
        notice("Going on with what was left without an end ...")
        await watch(session, left, view)


@contextlib.contextmanager
def _stopped_by_signals(operation: Operation[Any]) -> Iterator[None]:
    """The first signal calls the work off; a second Ctrl-C ends this program."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        operation.abort(f"{number.name} came")

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _answer(session: Session, event: ApprovalNeeded) -> None:
    """Ask whoever sits at the terminal; where nobody does, the call is denied."""
    allowed = False
    if sys.stdin.isatty():
        question = f"Allow {event.name}?"
        with contextlib.suppress(typer.Abort):
            allowed = await asyncio.to_thread(typer.confirm, question, err=True)
    if allowed:
        await session.approve(event.call_id)
    else:
        await session.deny(event.call_id, "whoever runs this did not allow it")
