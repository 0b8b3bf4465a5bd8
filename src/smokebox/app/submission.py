"""One piece of work that an app was given: a message for an agent, or a run of a workflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from smokebox.agents.events import Outcome
from smokebox.wire.failure import Failure

Kind: TypeAlias = Literal["agent", "workflow"]
State: TypeAlias = Literal["waiting", "running", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whose turn it is: work of one target is done one piece after the other.

    `name` is that of the agent or workflow, `id` the conversation's or the run's.
    """

    kind: Kind
    name: str
    id: str

    def __str__(self) -> str:
        return f"{self.kind}s/{self.name}/{self.id}"


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """What work came to. `result` is what a workflow returned, or an agent's answer."""

    outcome: Outcome
    result: Any = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Accepted work, as the inbox has it. `attempts` counts how often it was begun, and `head`
    is the offset of its conversation behind which all of it is."""

    id: str
    target: Target
    body: Any
    accepted_at: float
    state: State = "waiting"
    attempts: int = 0
    abort_asked: bool = False
    ended_at: float | None = None
    ending: Ending | None = None
    request: dict[str, Any] | None = None
    head: int = 0
