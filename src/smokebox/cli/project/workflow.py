"""A workflow of a project, run in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from smokebox.app.app import App
from smokebox.app.inbox import AppInbox, SubmissionOutcome, WorkTarget
from smokebox.app.runner import Runner
from smokebox.cli.agents.conversation import ABORTED, abort_on_signals
from smokebox.cli.project.activity import ActivityView
from smokebox.errors import Aborted, InvalidOption
from smokebox.foundation.ids import new_global_id
from smokebox.wire.failure import error_of, failure_of

if TYPE_CHECKING:
    from smokebox.app.inbox import StoredSubmission


_ABORTED_BY_SIGNAL = SubmissionOutcome(
    "aborted", error=failure_of(Aborted("the run was aborted.", reason="signal"))
)


def run_workflow(name: str, payload: str | None, *, folder: Path) -> int:
    """Run a workflow; print its result to stdout as JSON, everything else to stderr."""
    value = read_payload(payload)
    app = App(folder, strict=False)
    app.project.find("workflow", name)
    with contextlib.redirect_stdout(sys.stderr):
        done = asyncio.run(_run(app, name, value))
    assert done.outcome is not None
    if done.outcome.status == "completed":
        typer.echo(json.dumps(done.outcome.result, ensure_ascii=False, indent=2))
        return 0
    assert done.outcome.error is not None
    error = error_of(done.outcome.error)
    if isinstance(error, Aborted):
        typer.secho(f"smokebox: {error.message}", err=True, fg="yellow")
        return ABORTED
    raise error


def read_payload(text: str | None) -> Any:
    """Parse `--payload`: JSON, - for stdin, or @ and a file name. Raises `InvalidOption`."""
    if text is None:
        return None
    where = "--payload"
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            where = text[1:]
            text = Path(where).read_text()
        return json.loads(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidOption(
            f"{where} is not JSON: {reason}.",
            hint="""Pass --payload '{"name": "Ada"}', or --payload @file.json.""",
            option="payload",
        ) from None


async def _run(app: App, name: str, payload: Any) -> StoredSubmission:
    """Run a workflow in a temporary inbox: that of the app belongs to its server."""
    await app.start(work=False)
    with tempfile.TemporaryDirectory() as folder:
        inbox = AppInbox(os.path.join(folder, "inbox.db"))
        runner = Runner(inbox, app.store, app.conversations, lambda: app.project, app.env)
        target = WorkTarget(kind="workflow", name=name, id=new_global_id())
        activity = ActivityView(app, inbox=inbox, id=target.id)
        watching = asyncio.create_task(activity.follow())
        try:
            submission = await inbox.accept(target, payload)
            runner.start()
            with abort_on_signals(lambda _: inbox.abort(submission.id, _ABORTED_BY_SIGNAL)):
                done = await inbox.wait(submission.id)
            watching.cancel()
            await asyncio.wait([watching])
            await activity.update()
            return done
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await runner.stop()
            await inbox.aclose()
            await app.stop(0)
