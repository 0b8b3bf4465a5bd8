"""Checkpoints of the workspace while a prompt is answered, and the work item that restores one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.agents.events import CheckpointEnd
from smokebox.agents.log.records import CheckpointTaken, MessageAdded, WorkAccepted
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.workspace import no_workspace
from smokebox.agents.workspace_snapshots import no_checkpoint, restore_snapshot, take_snapshot
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.log.conversation import Checkpoint, Conversation, WorkState
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.work.item import WorkContext

_MAX_PROMPT = 60

_log = logging.getLogger("smokebox.agents")


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Takes the checkpoints of one prompt. `prompt` is its text, and `turns` those before a crash.

    A session that does a task in the sandbox of the harness takes none: it is a part of a turn.
    """

    work: WorkContext
    prompt: str
    turns: int = 0

    async def begin(self) -> None:
        """Take one of the state that the prompt found."""
        await self._take(f"turn {self.turns} of" if self.turns else "before")

    async def end_turn(self, calls: Sequence[ToolCall], *, resumed: bool = False) -> None:
        """Take one after a turn, if its calls changed files."""
        self.turns += not resumed
        names = ", ".join(dict.fromkeys(call.name for call in calls))
        await self._take(f"turn {self.turns} ({names}) of")

    async def _take(self, when: str) -> None:
        session = self.work.session
        sandbox, keep = session.setup.sandbox, session.setup.options.checkpoints
        shared = session.depth > 0 and sandbox is session.registry.setup.sandbox
        if not keep or sandbox is None or shared:
            return
        prompt = " ".join(self.prompt.split())
        shown = prompt if len(prompt) <= _MAX_PROMPT else f"{prompt[: _MAX_PROMPT - 3]}..."
        description = f"{session.name}: {when} {shown!r}"
        try:
            found = await take_snapshot(
                sandbox,
                session.event_log.store,
                description,
                keep=keep,
                known=session.checkpoint_state,
            )
        except NotFound:
            # A sandbox that was not used yet does not exist.
            return
        except Exception as error:
            # The turn is done, and what it wrote is there.
            _log.warning("session %s has no checkpoint: %s", session.key, error)
            self.work.emit(CheckpointEnd(self.turns, None, str(error)))
            return
        if found is None:
            return
        known = self.work.event_log.conversation.checkpoints
        session.checkpoint_state = found.state
        if known and known[-1].id == found.id:
            # A process before this one took it.
            return
        kept = {one.id for one in known[-keep + 1 :]} if keep > 1 else set()
        self.work.event_log.add(
            CheckpointTaken(
                self.work.work_id,
                found.id,
                self.turns,
                keep,
                description,
                found.in_blob,
                tuple(
                    one.id
                    for one in known
                    if one.in_blob and one.session is None and one.id not in kept
                ),
            )
        )
        self.work.emit(CheckpointEnd(self.turns, found.id))


@dataclass(slots=True, kw_only=True)
class RestoreItem(WorkItem):
    """Restores a checkpoint, and tells the model. Safe to repeat after a crash."""

    kind: WorkKind = "restore"
    checkpoint: str

    @classmethod
    def resumed(cls, session: SessionContext, work: WorkState) -> RestoreItem:
        """Return a restore that a killed process left unfinished."""
        return cls(session=session, work_id=work.id, checkpoint=work.options.get("checkpoint", ""))

    async def accept(self) -> WorkAccepted:
        """Return the record."""
        options = {"checkpoint": self.checkpoint}
        return WorkAccepted(self.work_id, self.kind, None, options)

    async def run(self, ctx: WorkContext) -> WorkResult:
        """Replace the files."""
        found = find_checkpoint(ctx.event_log.conversation, self.checkpoint)
        sandbox = self.session.setup.sandbox
        if sandbox is None:
            raise no_workspace("session.restore")
        await restore_snapshot(sandbox, ctx.event_log.store, found)
        self.session.checkpoint_state = None
        text = (
            "The user restored the files of the workspace to an earlier state: "
            f"{found.description}. What was done to them since is undone, and processes ended."
        )
        message = UserMessage((Text(text),), signal="restore")
        ctx.event_log.add(MessageAdded(self.work_id, message))
        return WorkResult(value=None, text=found.description)

    def restore(self, end: WorkEnded) -> WorkResult:
        """Return nothing, as `run` does."""
        return WorkResult(value=None, text=end.text)


def find_checkpoint(conversation: Conversation, wanted: Checkpoint | str) -> Checkpoint:
    """Return a checkpoint of a conversation by its id. Raises `NotFound`."""
    id = wanted if isinstance(wanted, str) else wanted.id
    offset = None if isinstance(wanted, str) else wanted.offset
    found = [one for one in conversation.checkpoints if one.id == id]
    if not found:
        raise no_checkpoint(id)
    return next((one for one in found if one.offset == offset), found[-1])
