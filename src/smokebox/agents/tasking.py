"""A task that the program gives, as a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smokebox.agents.job import Ending
from smokebox.agents.log.records import WorkAccepted
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.prompting import restored_data
from smokebox.agents.reply import Reply
from smokebox.agents.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.budget import Meter
    from smokebox.agents.log.records import Record, WorkEnded, WorkKind
    from smokebox.agents.messages import Usage
    from smokebox.agents.operation import Operation
    from smokebox.agents.results import ResultSpec
    from smokebox.agents.session import Session


@dataclass(slots=True, kw_only=True)
class Tasking:
    """Has a child session do something; the model of this one is not told."""

    session: Session
    work_id: str
    prompt: str
    agent: str | None
    cwd: str | None
    result: ResultSpec[Any] | None
    timeout: float | None
    meter: Meter
    key: str | None = None

    @property
    def kind(self) -> WorkKind:
        """That it is a task."""
        return "task"

    @property
    def usage(self) -> Usage:
        """What it took up to now."""
        return self.meter.usage

    async def accept(self) -> WorkAccepted:
        """All that it takes to go on with it."""
        options: dict[str, Any] = {"agent": self.agent, "cwd": self.cwd, "timeout": self.timeout}
        if self.result is not None:
            options["result"] = self.result.schema
        given = {name: value for name, value in options.items() if value is not None}
        return WorkAccepted(
            self.work_id, self.kind, UserMessage((Text(self.prompt),)), given, self.key
        )

    def begin(self) -> list[Record]:
        """Nothing: the model of this session is not told."""
        return []

    async def run(self, operation: Operation[Any], joins: Callable[[], bool]) -> Ending:
        """Have it done."""
        children = self.session.journal.conversation.tasks.values()
        known = [one.session for one in children if one.work_id == self.work_id]
        tasks = Tasks(
            session=self.session,
            work_id=self.work_id,
            emit=operation.emit,
            meter=self.meter,
            known={"": known[0]} if known else {},
        )
        reply = await tasks.do(
            self.prompt, agent=self.agent, cwd=self.cwd, result=self.result, timeout=self.timeout
        )
        dumped = None if self.result is None else self.result.dump(reply.data)
        return Ending(value=reply, text=reply.text, result=dumped)

    def restore(self, end: WorkEnded) -> Ending:
        """What it came to, from the record."""
        data = None if self.result is None else restored_data(self.result, end.result)
        return Ending(value=Reply(text=end.text, data=data, usage=end.usage), text=end.text)

    def stop(self) -> None:
        """The child is called off when its awaiting is cancelled."""
